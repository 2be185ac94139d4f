"""Sessions that are born with a history, and operations that keep the one there is."""

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from recapd.storage.entry import Entry, Reminder, encode_entry
from recapd.storage.errors import OperationReused, SessionExists, UnknownSession
from recapd.storage.store import (
    Appended,
    Event,
    History,
    NewItem,
    NewSession,
    Parent,
    Receipt,
    Replacement,
    Replayed,
    Session,
    Store,
    Tokens,
)

LINES = [
    encode_entry(Entry(2, 5, b'{"type":"function_call","call_id":"c"}')),
    encode_entry(Entry(1, 4, b'{"n": 1.0}', Reminder(3, "o", 7))),
]
HISTORY = History(LINES, ["c"], 10, Tokens(4, 2))
FORK = NewSession("fork", "t", "/x", {"a": "b"}, "durable", Parent("s", 7))
RECEIPT = Receipt("o", "session.fork", b"digest")

Look = Callable[..., Awaitable[dict[str, object]]]


def render(session: Session) -> bytes:
    return msgspec.json.encode(session)


async def lines_of(store: Store, session_id: str) -> list[bytes]:
    return (await store.page(session_id, limit=100, bytes_max=1 << 20)).entries


async def test_a_session_can_be_born_with_a_history(
    store: Store, advance: Callable[[int], int], heard: list[Event]
) -> None:
    """PROTOCOL.md §2: a new session is at revision and generation 0; one event tells of it."""
    now_ms = advance(5)
    session = await store.create(FORK, history=HISTORY).wait()
    assert session == Session(
        session_id="fork",
        title="t",
        cwd="/x",
        labels={"a": "b"},
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
        durability="durable",
        state="active",
        revision=0,
        generation=0,
        entries=2,
        tokens=Tokens(4, 2),
        archived_revisions=(),
        next_entry_id=10,
        seq=1,
        running=None,
        parent=Parent("s", 7),
    )
    assert await store.session("fork") == session
    assert await lines_of(store, "fork") == LINES
    assert [event.method for event in heard] == ["session.created"]


async def test_what_is_appended_to_it_goes_on_behind_its_ids_and_calls(store: Store) -> None:
    await store.create(FORK, history=HISTORY).wait()
    items = [NewItem(b"{}", 1, outputs=("c",)), NewItem(b"{}", 1, outputs=("d",))]
    appended = await store.append("fork", items).wait()
    assert isinstance(appended, Appended)
    assert (appended.first_entry_id, appended.session.revision) == (10, 1)
    assert appended.unmatched == ((11, "d"),)
    assert appended.session.tokens == Tokens(4, 4)
    assert appended.session.parent == Parent("s", 7)


async def test_a_history_that_it_was_born_with_is_archived_like_any(store: Store) -> None:
    session = await store.create(FORK, history=HISTORY).wait()
    assert isinstance(session, Session)
    archive = await store.archive(session, "rewind", "r")
    change = Replacement("r", archive, History([], [], 10, Tokens()), {})
    replaced = await store.replace("fork", change, render=render).wait()
    assert isinstance(replaced, Session)
    assert (replaced.archived_revisions, replaced.parent) == ((0,), Parent("s", 7))
    page = await store.page("fork", revision=0, limit=100, bytes_max=1 << 20)
    assert page.entries == LINES


async def test_a_session_that_is_deleted_and_made_anew_has_no_parent(store: Store) -> None:
    await store.create(FORK, history=HISTORY).wait()
    await store.delete("fork").wait()
    session = await store.create(NewSession("fork")).wait()
    assert isinstance(session, Session)
    assert (session.parent, session.entries, session.next_entry_id) == (None, 0, 1)
    assert await lines_of(store, "fork") == []


async def test_an_id_in_use_is_refused_and_nothing_is_made(store: Store, look: Look) -> None:
    await store.create(NewSession("fork"), [NewItem(b"{}", 1)]).wait()
    before = await look(store)
    with pytest.raises(SessionExists):
        await store.create(FORK, history=HISTORY).wait()
    assert await look(store) == before


# Replacements under an operation id.


async def test_a_replacement_is_made_once_and_recorded(store: Store, look: Look) -> None:
    """PROTOCOL.md §2, "Operation id": restores and rewinds have no `begin` that would record it."""
    session = await store.create(FORK, history=HISTORY).wait()
    assert isinstance(session, Session)
    receipt = Receipt("r", "session.rewind", b"digest")
    assert await store.replayed(receipt) is None
    archive = await store.archive(session, "rewind", "r")
    change = Replacement("r", archive, History(LINES[:1], [], 10, Tokens(0, 1)), {})
    replaced = await store.replace("fork", change, receipt=receipt, render=render).wait()
    assert isinstance(replaced, Session)
    operation = await store.operation("r")
    assert (operation.status, operation.session_id) == ("completed", "fork")
    assert operation.outcome == render(replaced)
    before = await look(store, "r")
    again = await store.replace("fork", change, receipt=receipt, render=render).wait()
    assert again == Replayed(operation) == await store.replayed(receipt)
    for other in (Receipt("r", "session.restore", b"digest"), Receipt("r", "session.rewind", b"")):
        with pytest.raises(OperationReused):
            await store.replace("fork", change, receipt=other, render=render).wait()
        with pytest.raises(OperationReused):
            await store.replayed(other)
    assert await look(store, "r") == before


async def test_an_operation_can_keep_everything_and_still_be_recorded(
    store: Store, look: Look, advance: Callable[[int], int]
) -> None:
    session = await store.create(FORK, history=HISTORY).wait()
    before = await look(store)
    advance(5)
    assert await store.keep("fork", RECEIPT, render=render).wait() == session
    assert await look(store) == before
    operation = await store.operation("o")
    assert (operation.status, operation.outcome) == (
        "completed",
        render(await store.session("fork")),
    )
    await store.append("fork", [NewItem(b"{}", 1)]).wait()
    assert await store.keep("fork", RECEIPT, render=render).wait() == Replayed(operation)
    with pytest.raises(UnknownSession):
        await store.keep("other", Receipt("p", "m", b""), render=render).wait()
