"""Every change leaves its events: numbered without gaps, exact in every member, in order."""

import json
from collections.abc import Awaitable, Callable

import pytest

from recapd.storage.entry import Entry, encode_time
from recapd.storage.store import (
    Event,
    NewItem,
    NewSession,
    Receipt,
    Session,
    SessionChanges,
    Store,
)

ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)

ReplaceHistory = Callable[..., Awaitable[Session]]


def members(event: Event) -> list[tuple[str, object]]:
    """The members of an event's body, in their order."""
    return list(json.loads(event.body).items())


def envelope(
    seq: int, revision: int, generation: int, at_ms: int, operation_id: str | None = None
) -> list[tuple[str, object]]:
    """What every event of session `s` says (PROTOCOL.md §4)."""
    always: list[tuple[str, object]] = [
        ("session_id", "s"),
        ("seq", seq),
        ("prev_seq", seq - 1),
        ("revision", revision),
        ("generation", generation),
        ("at", encode_time(at_ms)),
    ]
    return always if operation_id is None else [*always, ("operation_id", operation_id)]


def receipt(operation_id: str) -> Receipt:
    return Receipt(operation_id, "session.change", b"")


async def test_each_change_says_what_it_did(
    store: Store, heard: list[Event], advance: Callable[[int], int]
) -> None:
    t1 = advance(0)
    await store.create(NewSession("s")).wait()
    t2 = advance(1001)
    await store.append("s", [ITEM, ITEM, ITEM]).wait()
    t3 = advance(1)
    await store.update("s", SessionChanges(title="t")).wait()
    t4 = advance(1)
    await store.delete("s").wait()
    assert [event.method for event in heard] == [
        "session.created",
        "history.appended",
        "session.updated",
        "session.deleted",
    ]
    assert [members(event) for event in heard] == [
        envelope(1, 0, 0, t1),
        [*envelope(2, 1, 0, t2), ("first_entry_id", 1), ("last_entry_id", 3)],
        envelope(3, 1, 0, t3),
        envelope(4, 1, 0, t4),
    ]


async def test_an_event_names_the_operation_it_belongs_to(
    store: Store, heard: list[Event], advance: Callable[[int], int]
) -> None:
    await store.create(NewSession("s"), [ITEM], receipt=receipt("o1")).wait()
    await store.append("s", [ITEM], receipt=receipt("o2")).wait()
    await store.update("s", SessionChanges(), receipt=receipt("o3")).wait()
    await store.delete("s", receipt=receipt("o4")).wait()
    at_ms = advance(0)
    assert [members(event) for event in heard] == [
        envelope(1, 0, 0, at_ms, "o1"),
        [*envelope(2, 1, 0, at_ms, "o1"), ("first_entry_id", 1), ("last_entry_id", 1)],
        [*envelope(3, 2, 0, at_ms, "o2"), ("first_entry_id", 2), ("last_entry_id", 2)],
        envelope(4, 2, 0, at_ms, "o3"),
        envelope(5, 2, 0, at_ms, "o4"),
    ]


async def test_a_compaction_says_that_it_began_what_it_replaced_and_that_it_is_done(
    store: Store,
    heard: list[Event],
    advance: Callable[[int], int],
    replace_history: ReplaceHistory,
) -> None:
    await store.create(NewSession("s"), [ITEM, ITEM]).wait()
    further: dict[str, object] = {
        "tokens_before": 6,
        "tokens_after": 2,
        "retained_entry_ids": [],
        "reminder_entry_id": 3,
        "carried_over": 0,
    }
    quality: dict[str, object] = {"quality": "offline"}
    await replace_history(store, "s", "o", [Entry(3, 0, b"{}")], event=further, finished=quality)
    at_ms = advance(0)
    *_, started, replaced, finished = heard
    assert started.method == "compaction.started"
    assert members(started) == envelope(3, 1, 0, at_ms, "o")
    assert replaced.method == "history.replaced"
    assert members(replaced) == [
        *envelope(4, 2, 1, at_ms, "o"),
        ("kind", "compaction"),
        ("from_generation", 0),
        ("to_generation", 1),
        ("archived_revision", 1),
        ("entries_before", 2),
        ("entries_after", 1),
        *further.items(),
    ]
    assert finished.method == "compaction.finished"
    assert members(finished) == [
        *envelope(5, 2, 1, at_ms, "o"),
        ("status", "completed"),
        ("quality", "offline"),
    ]


@pytest.mark.parametrize("kind", ["restore", "rewind"])
async def test_a_restore_or_rewind_says_what_it_replaced(
    store: Store, heard: list[Event], replace_history: ReplaceHistory, kind: str
) -> None:
    await store.create(NewSession("s"), [ITEM, ITEM]).wait()
    await replace_history(store, "s", "o", [Entry(1, 0, b"{}")], kind=kind)
    assert [event.method for event in heard[2:]] == ["history.replaced"]
    assert dict(members(heard[2])).items() >= {"kind": kind, "operation_id": "o", "seq": 3}.items()


async def test_a_compaction_that_ends_without_a_replacement_says_how(
    store: Store, heard: list[Event], advance: Callable[[int], int]
) -> None:
    await store.create(NewSession("s"), [ITEM]).wait()
    await store.begin("s", receipt("o")).wait()
    at_ms = advance(10)
    await store.end("o", "failed", b"{}", {"reason": "superseded"}).wait()
    assert heard[-1].method == "compaction.finished"
    assert members(heard[-1]) == [
        *envelope(4, 1, 0, at_ms, "o"),
        ("status", "failed"),
        ("reason", "superseded"),
    ]


async def test_a_deleted_session_says_first_that_its_compaction_is_over(
    store: Store, heard: list[Event], advance: Callable[[int], int]
) -> None:
    await store.create(NewSession("s")).wait()
    await store.begin("s", receipt("o")).wait()
    await store.delete("s").wait()
    at_ms = advance(0)
    assert [members(event) for event in heard[2:]] == [
        [*envelope(3, 0, 0, at_ms, "o"), ("status", "cancelled"), ("reason", "session_deleted")],
        envelope(4, 0, 0, at_ms),
    ]


async def test_what_was_heard_is_what_is_kept(
    store: Store, heard: list[Event], replace_history: ReplaceHistory
) -> None:
    for session_id in ("s", "t"):
        await store.create(NewSession(session_id), [ITEM]).wait()
    await replace_history(store, "t", "o", [])
    await store.append("s", [ITEM]).wait()
    assert [(e.ordinal, e.session_id, e.seq) for e in heard] == [
        (1, "s", 1),
        (2, "s", 2),
        (3, "t", 1),
        (4, "t", 2),
        (5, "t", 3),
        (6, "t", 4),
        (7, "t", 5),
        (8, "s", 3),
    ]
    assert await store.events_of_all(after_ordinal=0, limit=100) == heard
    assert await store.events_of_all(after_ordinal=2, limit=3) == heard[2:5]
    assert await store.last_ordinal() == 8


async def test_the_events_of_a_session_are_read_from_any_of_them_on(
    store: Store, heard: list[Event]
) -> None:
    await store.create(NewSession("s")).wait()
    await store.create(NewSession("t")).wait()
    for _ in range(4):
        await store.append("s", [ITEM]).wait()
    of_session = [event for event in heard if event.session_id == "s"]
    assert await store.events("s", after_seq=0, limit=100) == of_session
    assert await store.events("s", after_seq=1, limit=2) == of_session[1:3]
    assert await store.events("s", after_seq=5, limit=2) == []


async def test_there_are_no_events_where_nothing_happened(store: Store) -> None:
    assert await store.events("s", after_seq=0, limit=100) == []
    assert await store.events_of_all(after_ordinal=0, limit=100) == []
    assert await store.last_ordinal() == 0


async def test_ordinals_are_never_used_again(store: Store, heard: list[Event]) -> None:
    await store.create(NewSession("s")).wait()
    await store.delete("s").wait()
    await store.create(NewSession("s")).wait()
    await store.delete("s").wait()
    assert [(event.ordinal, event.seq) for event in heard] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert await store.events_of_all(after_ordinal=0, limit=9) == heard[3:]
    assert await store.last_ordinal() == 4
