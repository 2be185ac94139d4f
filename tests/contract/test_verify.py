"""`Store.verify` of stores that nothing has happened to."""

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from recapd.storage.entry import Entry
from recapd.storage.errors import UnknownSession
from recapd.storage.store import Fault, NewItem, NewSession, Parent, Session, Store

Replace = Callable[..., Awaitable[Session]]
ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)


async def grown(store: Store, replace_history: Replace) -> None:
    """Session `a` with two archived revisions and a fork of it."""
    await store.create(NewSession("a"), [ITEM, ITEM]).wait()
    await replace_history(store, "a", "one", [Entry(3, 0, b"{}"), Entry(1, 0, b"{}")])
    await store.append("a", [ITEM]).wait()
    await replace_history(store, "a", "two", [Entry(5, 0, b"{}")], kind="rewind")
    await store.create(NewSession("b", parent=Parent("a", 1))).wait()


async def test_a_store_is_as_it_was_written(store: Store, replace_history: Replace) -> None:
    await grown(store, replace_history)
    whole = await store.verify("a", read=lambda _: True)
    assert (whole.histories, whole.faults) == (3, [])
    assert whole.bytes > 0
    structure = await store.verify("a", read=lambda _: False)
    assert (structure.histories, structure.bytes, structure.faults) == (3, 0, [])
    empty = await store.verify("b", read=lambda _: True)
    faults: list[Fault] = []
    assert (empty.histories, empty.bytes, empty.faults) == (1, 0, faults)


async def test_each_revision_may_be_read_or_not(store: Store, replace_history: Replace) -> None:
    await grown(store, replace_history)
    session = await store.session("a")
    asked = Counter[int]()

    def read(revision: int) -> bool:
        asked[revision] += 1
        return revision == session.revision

    found = await store.verify("a", read=read)
    assert asked == Counter([session.revision, *session.archived_revisions])
    assert 0 < found.bytes < (await store.verify("a", read=lambda _: True)).bytes


async def test_an_unknown_session_is_no_fault(store: Store) -> None:
    with pytest.raises(UnknownSession):
        await store.verify("nobody", read=lambda _: True)
