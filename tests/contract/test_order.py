"""Changes happen in the order of the calls, each wholly or not at all; events are heard first."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import anyio
import pytest

from recapd.storage.errors import (
    Conflict,
    OperationUnknown,
    StoreClosed,
    StoreError,
    UnknownSession,
)
from recapd.storage.pending import Pending
from recapd.storage.store import (
    Appended,
    Event,
    Expect,
    NewItem,
    NewSession,
    Receipt,
    Replayed,
    Session,
    SessionChanges,
    Store,
)

ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)
NEW = NewSession("s")


async def test_changes_take_effect_in_the_order_in_which_they_are_handed_over(store: Store) -> None:
    """Module of store.py. Nothing is waited for in between."""
    created = store.create(NEW)
    first = store.append("s", [ITEM], expect=Expect(revision=0))
    stale = store.append("s", [ITEM], expect=Expect(revision=0))
    second = store.append("s", [ITEM, ITEM], expect=Expect(revision=1))
    deleted = store.delete("s", expect=Expect(revision=2))
    late = store.append("s", [ITEM])
    assert isinstance(await created.wait(), Session)
    appended = [await first.wait(), await second.wait()]
    assert [(a.first_entry_id, a.last_entry_id) for a in appended if isinstance(a, Appended)] == [
        (1, 1),
        (2, 3),
    ]
    assert await deleted.wait() is True
    with pytest.raises(Conflict) as conflict:
        await stale.wait()
    assert (conflict.value.revision, conflict.value.generation) == (1, 0)
    with pytest.raises(UnknownSession):
        await late.wait()


async def test_outcomes_are_told_in_the_order_of_the_calls_refusals_too(store: Store) -> None:
    told: list[int] = []

    def note(number: int, _: object) -> None:
        told.append(number)

    changes: list[Pending[Session | Replayed] | Pending[Appended | Replayed]] = [
        store.create(NEW),
        store.append("t", [ITEM]),
        store.append("s", [ITEM]),
        store.create(NEW),
        store.update("s", SessionChanges(title="t")),
    ]
    for number, pending in enumerate(changes):
        assert not pending.done
        pending.on_done(partial(note, number))
    for pending in changes:
        try:
            await pending.wait()
        except StoreError:
            pass
    assert told == [0, 1, 2, 3, 4]


async def test_the_events_of_a_change_are_heard_before_it_is_told(
    store: Store, heard: list[Event]
) -> None:
    heard_when_told: list[list[str]] = []

    def note(_: object) -> None:
        heard_when_told.append([event.method for event in heard])

    store.create(NEW, [ITEM]).on_done(note)
    store.update("s", SessionChanges()).on_done(note)
    await store.delete("s").wait()
    first, second = heard_when_told
    assert first[:2] == ["session.created", "history.appended"]
    assert second[:3] == ["session.created", "history.appended", "session.updated"]


@pytest.mark.promise("D9")
async def test_a_change_goes_on_when_its_waiter_is_cancelled(store: Store) -> None:
    """Pending: a cancelled wait neither undoes nor hides it."""
    await store.create(NEW).wait()
    *_, last = [store.append("s", [ITEM]) for _ in range(10)]
    with anyio.CancelScope() as scope:
        scope.cancel()
        await last.wait()
    assert scope.cancelled_caught
    appended = await last.wait()
    assert isinstance(appended, Appended)
    assert appended.session.entries == 10
    assert await store.session("s") == appended.session


async def test_a_refused_change_costs_its_neighbours_nothing(
    store: Store, heard: list[Event]
) -> None:
    await store.create(NEW).wait()
    before, refused, after = (
        store.append("s", [ITEM]),
        store.append("s", [ITEM], expect=Expect(generation=7)),
        store.append("s", [ITEM]),
    )
    await before.wait()
    with pytest.raises(Conflict):
        await refused.wait()
    await after.wait()
    assert (await store.session("s")).entries == 2
    assert [event.seq for event in heard] == [1, 2, 3]


async def test_a_change_whose_outcome_cannot_be_written_down_is_not_made(
    store: Store, heard: list[Event]
) -> None:
    """Nor does it cost its neighbours anything, or happen later."""

    def fail(_: object) -> bytes:
        raise ZeroDivisionError

    await store.create(NEW).wait()
    receipt = Receipt("o", "session.append", b"")
    before, failed, after = (
        store.append("s", [ITEM]),
        store.append("s", [ITEM, ITEM], receipt=receipt, render=fail),
        store.append("s", [ITEM]),
    )
    with pytest.raises(ZeroDivisionError):
        await failed.wait()
    for pending, entry_id in ((before, 1), (after, 2)):
        appended = await pending.wait()
        assert isinstance(appended, Appended)
        assert appended.last_entry_id == entry_id
    with pytest.raises(OperationUnknown):
        await store.operation("o")
    assert (await store.session("s")).entries == 2
    assert [event.seq for event in heard] == [1, 2, 3]


async def test_every_change_handed_over_before_the_close_is_made_and_told(
    open_new: Callable[[], AbstractAsyncContextManager[Store]],
) -> None:
    heard: list[Event] = []
    async with open_new() as store:
        store.listen(heard.extend)
        pending = [store.create(NEW), store.create(NEW), store.create(NewSession("t"))]
    assert all(each.done for each in pending)
    assert [event.session_id for event in heard] == ["s", "t"]


async def test_a_closed_store_refuses_every_change(
    open_new: Callable[[], AbstractAsyncContextManager[Store]],
) -> None:
    async with open_new() as store:
        await store.create(NEW).wait()
    with pytest.raises(StoreClosed):
        await store.append("s", [ITEM]).wait()


async def test_reads_show_a_change_as_soon_as_it_is_told(
    store: Store, look: Callable[..., Awaitable[dict[str, object]]]
) -> None:
    session = await store.create(NEW).wait()
    for _ in range(20):
        appended = await store.append("s", [ITEM]).wait()
        assert isinstance(appended, Appended)
        seen = await look(store)
        assert seen["sessions"] == [appended.session]
        assert seen["last_ordinal"] == appended.session.seq
        assert appended.session != session
