"""Sessions are made, changed, put away and deleted; a deleted one leaves nothing but its count."""

from collections.abc import Awaitable, Callable

import pytest

from recapd.storage.entry import Entry, decode_entry, encode_entry
from recapd.storage.errors import (
    Conflict,
    RevisionUnknown,
    SessionClosed,
    SessionExists,
    UnknownSession,
)
from recapd.storage.store import (
    Appended,
    AutoCompact,
    Event,
    Expect,
    NewItem,
    NewSession,
    Receipt,
    Session,
    SessionChanges,
    Store,
    Tokens,
)

ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)
AUTO_COMPACT = AutoCompact(1000, 10, "say \x00 \U0001f600 \u2028", "chat")
NEW = NewSession("s", "A title", "/home/me", {"team": "a"}, "transient", auto_compact=AUTO_COMPACT)
COMPACT = Receipt("compact", "session.compact", b"")

Look = Callable[..., Awaitable[dict[str, object]]]


async def test_a_new_session_is_empty_and_at_revision_0(
    store: Store, advance: Callable[[int], int]
) -> None:
    now_ms = advance(0)
    session = Session(
        session_id="s",
        title="A title",
        cwd="/home/me",
        labels={"team": "a"},
        created_at_ms=now_ms,
        updated_at_ms=now_ms,
        durability="transient",
        state="active",
        revision=0,
        generation=0,
        entries=0,
        tokens=Tokens(0, 0),
        archived_revisions=(),
        next_entry_id=1,
        seq=1,
        running=None,
        auto_compact=AUTO_COMPACT,
    )
    assert await store.create(NEW).wait() == session
    assert await store.session("s") == session
    assert await store.revisions("s") == []
    assert (await store.page("s", limit=10, bytes_max=1000)).entries == []


async def test_a_session_can_be_made_with_its_first_items_in_one_change(
    store: Store, advance: Callable[[int], int]
) -> None:
    session = await store.create(NEW, [ITEM, ITEM]).wait()
    assert isinstance(session, Session)
    assert (session.revision, session.generation, session.entries) == (1, 0, 2)
    assert (session.next_entry_id, session.tokens, session.seq) == (3, Tokens(0, 6), 2)
    page = await store.page("s", limit=10, bytes_max=1000)
    now_ms = advance(0)
    assert page.entries == [encode_entry(Entry(n, now_ms, ITEM.item)) for n in (1, 2)]


async def test_a_session_id_in_use_is_refused(store: Store, look: Look) -> None:
    await store.create(NEW, [ITEM]).wait()
    before = await look(store)
    with pytest.raises(SessionExists):
        await store.create(NewSession("s", "Another"), [ITEM]).wait()
    assert await look(store) == before


async def test_a_store_has_an_id(store: Store) -> None:
    assert store.store_id
    assert store.store_id == store.store_id


CALLS: dict[str, Callable[[Store, Session], Awaitable[object]]] = {
    "append": lambda store, _: store.append("s", [ITEM]).wait(),
    "update": lambda store, _: store.update("s", SessionChanges()).wait(),
    "begin": lambda store, _: store.begin("s", COMPACT).wait(),
    "session": lambda store, _: store.session("s"),
    "revisions": lambda store, _: store.revisions("s"),
    "page": lambda store, _: store.page("s", limit=1, bytes_max=1),
    "archive": lambda store, session: store.archive(session, "rewind", "o"),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_session_that_is_not_there_is_unknown_to_every_call(
    store: Store, look: Look, name: str
) -> None:
    gone = await store.create(NewSession("s")).wait()
    assert isinstance(gone, Session)
    await store.delete("s").wait()
    before = await look(store, "compact")
    with pytest.raises(UnknownSession):
        await CALLS[name](store, gone)
    assert await look(store, "compact") == before


async def test_an_update_keeps_what_is_unset_and_clears_what_is_none(
    store: Store, advance: Callable[[int], int]
) -> None:
    await store.create(NEW, [ITEM]).wait()
    now_ms = advance(5)
    session = await store.update("s", SessionChanges(title=None, labels={"x": "y"})).wait()
    assert isinstance(session, Session)
    assert session == await store.session("s")
    assert (session.title, session.cwd, session.labels) == (None, "/home/me", {"x": "y"})
    assert (session.updated_at_ms, session.created_at_ms) == (now_ms, now_ms - 5)
    assert (session.revision, session.generation, session.state) == (1, 0, "active")
    assert session.auto_compact == AUTO_COMPACT
    for value in (None, AutoCompact(2000), None):
        updated = await store.update("s", SessionChanges(auto_compact=value)).wait()
        assert isinstance(updated, Session)
        assert updated == await store.session("s")
        assert (updated.auto_compact, updated.title) == (value, None)


async def test_an_update_of_nothing_is_an_update(
    store: Store, advance: Callable[[int], int], heard: list[Event]
) -> None:
    await store.create(NEW).wait()
    now_ms = advance(5)
    session = await store.update("s", SessionChanges()).wait()
    assert isinstance(session, Session)
    assert (session.updated_at_ms, session.seq) == (now_ms, 2)
    assert [event.method for event in heard] == ["session.created", "session.updated"]


@pytest.mark.parametrize("expect", [Expect(revision=0), Expect(1, 1), Expect(generation=1)])
async def test_a_change_that_expects_another_state_is_told_the_present_one(
    store: Store, look: Look, expect: Expect
) -> None:
    """PROTOCOL.md §2, Expect: the actual values, nothing done."""
    await store.create(NEW, [ITEM]).wait()
    before = await look(store, "compact")
    for pending in (
        store.append("s", [ITEM], expect=expect),
        store.update("s", SessionChanges(title="no"), expect=expect),
        store.begin("s", COMPACT, expect=expect),
        store.delete("s", expect=expect),
    ):
        with pytest.raises(Conflict) as conflict:
            await pending.wait()
        assert (conflict.value.revision, conflict.value.generation) == (1, 0)
    assert await look(store, "compact") == before


async def test_an_archived_session_takes_no_items_and_no_compaction(
    store: Store, look: Look
) -> None:
    await store.create(NEW, [ITEM]).wait()
    await store.update("s", SessionChanges(state="archived")).wait()
    before = await look(store, "compact")
    with pytest.raises(SessionClosed):
        await store.append("s", [ITEM]).wait()
    with pytest.raises(SessionClosed):
        await store.begin("s", COMPACT).wait()
    with pytest.raises(Conflict):
        await store.append("s", [ITEM], expect=Expect(revision=0)).wait()
    assert await look(store, "compact") == before


async def test_an_archived_session_can_be_read_changed_reopened_and_deleted(store: Store) -> None:
    await store.create(NEW, [ITEM]).wait()
    await store.update("s", SessionChanges(state="archived")).wait()
    assert (await store.session("s")).state == "archived"
    assert len((await store.page("s", limit=10, bytes_max=1000)).entries) == 1
    await store.update("s", SessionChanges(title="Still mine")).wait()
    await store.update("s", SessionChanges(state="active")).wait()
    await store.append("s", [ITEM]).wait()
    await store.update("s", SessionChanges(state="archived")).wait()
    assert await store.delete("s").wait() is True


async def test_a_deleted_session_is_gone_but_for_its_last_event(
    store: Store, heard: list[Event]
) -> None:
    await store.create(NEW, [ITEM]).wait()
    await store.create(NewSession("t")).wait()
    assert await store.delete("s", expect=Expect(1, 0)).wait() is True
    (last,) = await store.events("s", after_seq=0, limit=10)
    assert (last.method, last.seq, last.ordinal) == ("session.deleted", 3, 4)
    assert heard[-1] == last
    everything = await store.events_of_all(after_ordinal=0, limit=10)
    assert [event.session_id for event in everything] == ["t", "s"]
    with pytest.raises(UnknownSession):
        await store.session("s")


async def test_a_second_delete_changes_nothing(store: Store, look: Look) -> None:
    await store.create(NEW).wait()
    await store.delete("s").wait()
    before = await look(store)
    assert await store.delete("s").wait() is False
    assert await store.delete("s", expect=Expect(revision=7)).wait() is False
    assert await look(store) == before


async def test_a_session_made_anew_begins_anew_and_its_events_go_on(
    store: Store, heard: list[Event], replace_history: Callable[..., Awaitable[Session]]
) -> None:
    calls = NewItem(b'{"type":"function_call","call_id":"c"}', 3, calls=("c",))
    outputs = NewItem(b'{"type":"function_call_output","call_id":"c"}', 3, outputs=("c",))
    await store.create(NEW, [calls]).wait()
    await replace_history(store, "s", "compact", [Entry(1, 0, b"{}")], calls=["c"])
    assert (await store.session("s")).seq == 5
    await store.delete("s").wait()
    session = await store.create(NewSession("s")).wait()
    assert isinstance(session, Session)
    assert (session.revision, session.generation, session.next_entry_id) == (0, 0, 1)
    assert (session.seq, session.archived_revisions, session.title) == (7, (), None)
    appended = await store.append("s", [outputs]).wait()
    assert isinstance(appended, Appended)
    assert appended.unmatched == ((1, "c"),)
    assert await store.revisions("s") == []
    with pytest.raises(RevisionUnknown):
        await store.page("s", generation=3, limit=1, bytes_max=1)
    (line,) = (await store.page("s", limit=10, bytes_max=1000)).entries
    assert decode_entry(line).item == outputs.item
    assert [event.seq for event in heard] == [1, 2, 3, 4, 5, 6, 7, 8]
    kept = await store.events("s", after_seq=0, limit=10)
    assert [event.method for event in kept] == [
        "session.deleted",
        "session.created",
        "history.appended",
    ]


async def test_deleting_a_session_ends_its_compaction_first(
    store: Store, advance: Callable[[int], int], heard: list[Event]
) -> None:
    """PROTOCOL.md §4: exactly one `finished` for each `started`."""
    await store.create(NEW).wait()
    await store.begin("s", COMPACT).wait()
    await store.delete("s", ended=b'{"reason":"cancelled"}').wait()
    assert [event.method for event in heard] == [
        "session.created",
        "compaction.started",
        "compaction.finished",
        "session.deleted",
    ]
    operation = await store.operation("compact")
    assert (operation.status, operation.ended_at_ms) == ("cancelled", advance(0))
    assert operation.outcome == b'{"reason":"cancelled"}'
    assert await store.end("compact", "failed", b'{"late":true}', {}).wait() == operation
