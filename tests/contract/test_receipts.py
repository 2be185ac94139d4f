"""Under an operation id a change is made at most once, and how it ended can be asked later."""

from collections.abc import Awaitable, Callable

import msgspec
import pytest
from msgspec import structs

from recapd.storage.errors import (
    Conflict,
    OperationReused,
    OperationUnknown,
    SessionExists,
    StoreError,
)
from recapd.storage.pending import Pending
from recapd.storage.store import (
    NOTHING_EXPECTED,
    Appended,
    Expect,
    NewItem,
    NewSession,
    Operation,
    Receipt,
    Replayed,
    Session,
    SessionChanges,
    Store,
)

ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)
RECEIPT = Receipt("o", "session.change", b"digest")
STALE = Expect(revision=7)

Look = Callable[..., Awaitable[dict[str, object]]]
Outcome = Pending[Session | Replayed] | Pending[Appended | Replayed] | Pending[bool | Replayed]


def render(result: object) -> bytes:
    return msgspec.json.encode(result)


def create(store: Store, receipt: Receipt, expect: Expect = NOTHING_EXPECTED) -> Outcome:
    return store.create(NewSession("new"), [ITEM], receipt=receipt, render=render)


def append(store: Store, receipt: Receipt, expect: Expect = NOTHING_EXPECTED) -> Outcome:
    return store.append("s", [ITEM, ITEM], expect=expect, receipt=receipt, render=render)


def update(store: Store, receipt: Receipt, expect: Expect = NOTHING_EXPECTED) -> Outcome:
    changes = SessionChanges(title="new")
    return store.update("s", changes, expect=expect, receipt=receipt, render=render)


def delete(store: Store, receipt: Receipt, expect: Expect = NOTHING_EXPECTED) -> Outcome:
    return store.delete("s", expect=expect, receipt=receipt, render=render)


Change = Callable[..., Outcome]
every_change = pytest.mark.parametrize("change", [create, append, update, delete])


@pytest.fixture(autouse=True)
async def session(store: Store) -> Session:
    """There is a session to change."""
    session = await store.create(NewSession("s"), [ITEM]).wait()
    assert isinstance(session, Session)
    return session


@every_change
async def test_a_change_records_its_outcome_with_it(
    store: Store, advance: Callable[[int], int], change: Change
) -> None:
    now_ms = advance(10)
    result = await change(store, RECEIPT).wait()
    session_id = "new" if change is create else "s"
    operation = Operation(
        "o", "session.change", session_id, "completed", now_ms, now_ms, render(result)
    )
    assert await store.operation("o") == operation


@every_change
async def test_a_repeated_change_is_answered_and_not_made(
    store: Store, advance: Callable[[int], int], look: Look, change: Change
) -> None:
    await change(store, RECEIPT).wait()
    before = await look(store, "o")
    advance(10)
    assert await change(store, RECEIPT).wait() == Replayed(await store.operation("o"))
    assert await look(store, "o") == before


@every_change
async def test_a_repeated_change_is_answered_whatever_happened_since(
    store: Store, change: Change
) -> None:
    """The session moved on, was put away, was deleted; the client asks what became of its call."""
    await change(store, RECEIPT).wait()
    replayed = Replayed(await store.operation("o"))
    assert await change(store, RECEIPT, STALE).wait() == replayed
    if change is not delete:
        session_id = "new" if change is create else "s"
        await store.update(session_id, SessionChanges(state="archived")).wait()
        assert await change(store, RECEIPT).wait() == replayed
        await store.delete(session_id).wait()
    assert await change(store, RECEIPT).wait() == replayed


@every_change
async def test_a_repeat_that_does_not_wait_for_the_first_is_answered_too(
    store: Store, change: Change
) -> None:
    first, second = change(store, RECEIPT), change(store, RECEIPT)
    assert not isinstance(await first.wait(), Replayed)
    assert await second.wait() == Replayed(await store.operation("o"))


@every_change
@pytest.mark.parametrize(
    "other", [structs.replace(RECEIPT, method="other"), structs.replace(RECEIPT, digest=b"other")]
)
async def test_an_operation_id_stands_for_one_thing(
    store: Store, look: Look, change: Change, other: Receipt
) -> None:
    await store.append("s", [ITEM], receipt=other, render=render).wait()
    before = await look(store, "o")
    for expect in (NOTHING_EXPECTED, STALE):
        with pytest.raises(OperationReused):
            await change(store, RECEIPT, expect).wait()
    assert await look(store, "o") == before


@every_change
async def test_a_refused_change_leaves_its_operation_id_free(
    store: Store, look: Look, change: Change
) -> None:
    if change is create:
        await store.create(NewSession("new")).wait()
    before = await look(store, "o")
    with pytest.raises((Conflict, SessionExists)) as refusal:
        await change(store, RECEIPT, STALE).wait()
    assert isinstance(refusal.value, StoreError)
    assert await look(store, "o") == before
    with pytest.raises(OperationUnknown):
        await store.operation("o")
    if change is create:
        await store.delete("new").wait()
    assert not isinstance(await change(store, RECEIPT).wait(), Replayed)


async def test_deleting_what_is_not_there_is_recorded_like_any_change(store: Store) -> None:
    assert await store.delete("x", receipt=RECEIPT, render=render).wait() is False
    operation = await store.operation("o")
    assert (operation.session_id, operation.outcome) == ("x", b"false")
    await store.create(NewSession("x")).wait()
    assert await store.delete("x", receipt=RECEIPT, render=render).wait() == Replayed(operation)


async def test_a_change_without_an_operation_id_can_be_repeated(store: Store) -> None:
    for entries in (2, 3):
        appended = await store.append("s", [ITEM]).wait()
        assert isinstance(appended, Appended)
        assert appended.session.entries == entries


async def test_an_operation_that_never_was_is_unknown(store: Store) -> None:
    with pytest.raises(OperationUnknown):
        await store.operation("o")
    with pytest.raises(OperationUnknown):
        await store.end("o", "failed", b"{}", {}).wait()
