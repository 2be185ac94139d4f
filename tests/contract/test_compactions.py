"""A compaction is begun and ends once: without a replacement, or with one, archived first."""

from collections.abc import Awaitable, Callable

import msgspec
import pytest
from msgspec import structs

from recapd.storage.entry import Entry, Reminder, encode_entry
from recapd.storage.errors import (
    CompactionRunning,
    Conflict,
    OperationReused,
    Superseded,
    UnknownSession,
)
from recapd.storage.store import (
    Appended,
    Expect,
    History,
    Kind,
    NewItem,
    NewSession,
    Operation,
    Receipt,
    Replacement,
    Replayed,
    Revision,
    Session,
    SessionChanges,
    Store,
    Tokens,
)

ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)
RECEIPT = Receipt("o", "session.compact", b"digest")
REMINDER = Entry(3, 7, b'{"role":"user","content":"summary"}', Reminder(1, "o", 1))

Look = Callable[..., Awaitable[dict[str, object]]]
ReplaceHistory = Callable[..., Awaitable[Session]]


def render(session: Session) -> bytes:
    return msgspec.json.encode(session)


def replacement(archive: Revision, *history: Entry) -> Replacement:
    lines = [encode_entry(entry) for entry in history]
    return Replacement(archive.operation_id, archive, History(lines, [], 4, Tokens(9, 0)), {})


@pytest.fixture(autouse=True)
async def session(store: Store) -> Session:
    """There is a session `s` at revision 1, of two entries."""
    session = await store.create(NewSession("s"), [ITEM, ITEM]).wait()
    assert isinstance(session, Session)
    return session


async def begin(store: Store, receipt: Receipt = RECEIPT) -> Session:
    session = await store.begin("s", receipt).wait()
    assert isinstance(session, Session)
    return session


# Beginning and ending.


async def test_a_compaction_that_begins_changes_nothing_but_that_it_runs(
    store: Store, session: Session, advance: Callable[[int], int]
) -> None:
    now_ms = advance(10)
    begun = await store.begin("s", RECEIPT, expect=Expect(1, 0)).wait()
    assert begun == structs.replace(session, running="o", seq=session.seq + 1)
    assert await store.session("s") == begun
    operation = Operation("o", "session.compact", "s", "running", now_ms, None, None)
    assert await store.operation("o") == operation


async def test_one_compaction_of_a_session_runs_at_a_time(store: Store, look: Look) -> None:
    await begin(store)
    before = await look(store, "o", "p")
    with pytest.raises(CompactionRunning) as refusal:
        await store.begin("s", Receipt("p", "session.compact", b"digest")).wait()
    assert refusal.value.operation_id == "o"
    assert await store.begin("s", RECEIPT).wait() == Replayed(await store.operation("o"))
    with pytest.raises(OperationReused):
        await store.begin("s", structs.replace(RECEIPT, digest=b"other")).wait()
    assert await look(store, "o", "p") == before


async def test_a_stale_begin_is_a_conflict_also_while_a_compaction_runs(store: Store) -> None:
    await begin(store)
    with pytest.raises(Conflict):
        await store.begin(
            "s", Receipt("p", "session.compact", b""), expect=Expect(revision=0)
        ).wait()


async def test_sessions_are_compacted_independently(store: Store) -> None:
    await store.create(NewSession("t")).wait()
    await begin(store)
    begun = await store.begin("t", Receipt("p", "session.compact", b"")).wait()
    assert isinstance(begun, Session)
    assert begun.running == "p"


async def test_appends_and_updates_go_on_while_a_compaction_runs(store: Store) -> None:
    await begin(store)
    await store.append("s", [ITEM]).wait()
    session = await store.update("s", SessionChanges(title="t")).wait()
    assert isinstance(session, Session)
    assert (session.running, session.revision, session.entries) == ("o", 2, 3)


async def test_a_compaction_that_ends_without_a_replacement_leaves_the_history(
    store: Store, session: Session, advance: Callable[[int], int]
) -> None:
    began_ms = advance(0)
    await begin(store)
    ended_ms = advance(10)
    ended = await store.end("o", "failed", b'{"reason":"x"}', {"reason": "x"}).wait()
    assert ended == Operation(
        "o", "session.compact", "s", "failed", began_ms, ended_ms, b'{"reason":"x"}'
    )
    assert await store.operation("o") == ended
    assert await store.session("s") == structs.replace(session, seq=session.seq + 2)


async def test_a_compaction_ends_once(store: Store, look: Look) -> None:
    await begin(store)
    ended = await store.end("o", "cancelled", b"1", {}).wait()
    before = await look(store, "o")
    assert await store.end("o", "failed", b"2", {"reason": "late"}).wait() == ended
    assert await look(store, "o") == before
    assert await store.begin("s", RECEIPT).wait() == Replayed(ended)


async def test_a_change_that_is_no_compaction_cannot_be_ended(store: Store) -> None:
    await store.append("s", [ITEM], receipt=RECEIPT, render=lambda _: b"{}").wait()
    operation = await store.operation("o")
    assert await store.end("o", "failed", b"{}", {}).wait() == operation


async def test_the_next_compaction_can_begin_when_one_has_ended(store: Store) -> None:
    await begin(store)
    await store.end("o", "skipped", b"{}", {}).wait()
    assert (await begin(store, Receipt("p", "session.compact", b""))).running == "p"


# Archiving.


@pytest.mark.parametrize("kind", ["compaction", "restore", "rewind"])
async def test_an_archive_says_what_it_holds_and_changes_nothing(
    store: Store, look: Look, session: Session, advance: Callable[[int], int], kind: Kind
) -> None:
    before = await look(store)
    now_ms = advance(10)
    archive = await store.archive(session, kind, "o")
    assert len(archive.sha256) == 64
    assert archive == Revision(
        1, 0, kind, "o", now_ms, 2, Tokens(0, 6), archive.bytes, archive.sha256
    )
    assert await look(store) == before


async def test_an_empty_history_can_be_archived_and_replaced(
    store: Store, replace_history: ReplaceHistory
) -> None:
    await store.create(NewSession("t")).wait()
    session = await replace_history(store, "t", "p", [Entry(1, 7, b"{}")])
    assert (session.revision, session.archived_revisions) == (1, (0,))
    assert (await store.page("t", revision=0, limit=10, bytes_max=1000)).entries == []


async def test_a_history_that_has_changed_is_not_archived(store: Store, session: Session) -> None:
    await store.append("s", [ITEM]).wait()
    with pytest.raises(Superseded):
        await store.archive(session, "compaction", "o")


async def test_an_archive_that_was_not_used_can_be_made_anew(
    store: Store, session: Session
) -> None:
    await store.archive(session, "rewind", "o")
    await store.discard_archive("s", 1)
    await store.discard_archive("s", 1)
    await store.archive(session, "rewind", "p")
    archive = await store.archive(session, "rewind", "q")
    await store.replace("s", replacement(archive), render=render).wait()
    assert await store.revisions("s") == [archive]
    assert len((await store.page("s", revision=1, limit=10, bytes_max=1000)).entries) == 2


async def test_an_archive_that_a_revision_names_is_never_discarded(
    store: Store, look: Look, replace_history: ReplaceHistory
) -> None:
    await replace_history(store, "s", "o", [REMINDER])
    before = await look(store)
    await store.discard_archive("s", 1)
    assert await look(store) == before


# Replacing.


async def test_a_replacement_puts_the_new_history_in_place_and_keeps_the_old(
    store: Store, advance: Callable[[int], int]
) -> None:
    old = (await store.page("s", limit=10, bytes_max=1000)).entries
    began_ms = advance(0)
    begun = await begin(store)
    archive = await store.archive(begun, "compaction", "o")
    now_ms = advance(10)
    session = await store.replace(
        "s", replacement(archive, Entry(1, 5, ITEM.item), REMINDER), render=render
    ).wait()
    assert isinstance(session, Session)
    assert session == structs.replace(
        begun,
        updated_at_ms=now_ms,
        revision=2,
        generation=1,
        entries=2,
        tokens=Tokens(9, 0),
        archived_revisions=(1,),
        next_entry_id=4,
        seq=begun.seq + 2,
        running=None,
    )
    assert await store.session("s") == session
    page = await store.page("s", limit=10, bytes_max=1000)
    assert page.entries == [encode_entry(Entry(1, 5, ITEM.item)), encode_entry(REMINDER)]
    assert await store.revisions("s") == [archive]
    assert (await store.page("s", revision=1, limit=10, bytes_max=1000)).entries == old
    assert await store.operation("o") == Operation(
        "o", "session.compact", "s", "completed", began_ms, now_ms, render(session)
    )


async def test_entry_ids_go_on_behind_a_replacement(
    store: Store, replace_history: ReplaceHistory
) -> None:
    await replace_history(store, "s", "o", [REMINDER], tokens=Tokens(9, 1))
    appended = await store.append("s", [ITEM]).wait()
    assert isinstance(appended, Appended)
    assert (appended.first_entry_id, appended.session.revision) == (4, 3)
    assert appended.session.tokens == Tokens(9, 4)


async def test_archived_revisions_are_listed_newest_first(
    store: Store, replace_history: ReplaceHistory
) -> None:
    await replace_history(store, "s", "o", [REMINDER])
    await store.append("s", [ITEM]).wait()
    await replace_history(store, "s", "p", [Entry(1, 5, ITEM.item)], kind="rewind")
    session = await replace_history(store, "s", "q", [])
    assert session.archived_revisions == (4, 3, 1)
    revisions = await store.revisions("s")
    assert [(r.revision, r.generation, r.kind, r.operation_id) for r in revisions] == [
        (4, 2, "compaction", "q"),
        (3, 1, "rewind", "p"),
        (1, 0, "compaction", "o"),
    ]


async def test_a_history_that_changed_since_its_archive_is_not_replaced(
    store: Store, look: Look
) -> None:
    archive = await store.archive(await begin(store), "compaction", "o")
    await store.append("s", [ITEM]).wait()
    before = await look(store, "o")
    with pytest.raises(Superseded):
        await store.replace("s", replacement(archive, REMINDER), render=render).wait()
    assert await look(store, "o") == before
    assert (await store.operation("o")).status == "running"


async def test_a_compaction_that_was_ended_replaces_nothing(store: Store, look: Look) -> None:
    """PROTOCOL.md §5.6: a cancel that came first leaves everything as it was."""
    archive = await store.archive(await begin(store), "compaction", "o")
    await store.end("o", "cancelled", b"{}", {}).wait()
    before = await look(store, "o")
    with pytest.raises(Superseded):
        await store.replace("s", replacement(archive, REMINDER), render=render).wait()
    assert await look(store, "o") == before


async def test_a_session_that_was_deleted_is_not_replaced(store: Store, look: Look) -> None:
    archive = await store.archive(await begin(store), "compaction", "o")
    await store.delete("s").wait()
    before = await look(store, "o")
    with pytest.raises(UnknownSession):
        await store.replace("s", replacement(archive, REMINDER), render=render).wait()
    assert await look(store, "o") == before


async def test_a_restore_replaces_the_history_under_a_running_compaction(
    store: Store, replace_history: ReplaceHistory
) -> None:
    """PROTOCOL.md §5: the compaction is then ended as superseded by whoever runs it."""
    archive = await store.archive(await begin(store), "compaction", "o")
    session = await replace_history(store, "s", "p", [Entry(1, 5, ITEM.item)], kind="restore")
    assert (session.generation, session.running) == (1, "o")
    with pytest.raises(Superseded):
        await store.replace("s", replacement(archive, REMINDER), render=render).wait()
    await store.end("o", "failed", b"{}", {"reason": "superseded"}).wait()
    assert (await store.session("s")).running is None
