"""Restore, rewind and fork as a client sees them (PROTOCOL.md §2 to §5)."""

import errno
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.daemon.conftest import (
    WAIT_S,
    Daemon,
    Gate,
    HeldCommit,
    Message,
    Peer,
    notification,
    request,
    user,
)

from recapd.protocol.errors import (
    AlreadyCommitted,
    AlreadyExists,
    ArchiveMissing,
    Conflict,
    NotFound,
    OutcomeUnknown,
    RevisionNotFound,
    RpcError,
    StorageFull,
    Superseded,
)
from recapd.storage.errors import OutcomeUnknown as StoreOutcomeUnknown
from recapd.storage.ledger import Ledger
from recapd.storage.sqlite import SqliteStore
from recapd.storage.store import Kind, Receipt, Replacement, Replayed, Revision, Session

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
HoldCommits = Callable[[], HeldCommit]

CALL: Message = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT: Message = {"type": "function_call_output", "call_id": "c", "output": "done"}
ODD = b'{"role":"user" , "content":"caf\\u00e9", "n":1.0,"big":123456789012345678901,"n":2e0}'

RESTORE: tuple[str, Message] = ("session.restore", {"revision": 1})
REWIND: tuple[str, Message] = ("session.rewind", {"after_entry_id": 3})
REWIND_TO_NONE: tuple[str, Message] = ("session.rewind", {"after_entry_id": 0})
either = pytest.mark.parametrize(("method", "params"), [RESTORE, REWIND])


async def raw_entries(peer: Peer, session_id: str, **params: object) -> bytes:
    """The entries of a history as the bytes that were sent."""
    await peer.say(request("raw", "session.get", session_id=session_id, **params))
    frame = await peer.frame()
    return frame[frame.index(b'"entries":[') :]


async def compacted(peer: Peer) -> None:
    """A session `a` at revision 3: entries 1 and 2 are archived as revision 1, 3 and 4 are live."""
    await peer.call("session.create", session_id="a", items=[user("one"), user("two")])
    await peer.call("session.compact", session_id="a", operation_id="first")
    await peer.call("session.append", session_id="a", items=[user("three")])


async def look(peer: Peer, session_id: str = "a") -> Any:
    """All of a session that a change of history may change, and must not when it fails."""
    read = await peer.call("session.get", session_id=session_id)
    for name in ("updated_at", "busy"):
        del read["session"][name]
    return read, await peer.call("session.revisions", session_id=session_id)


async def events_of(peer: Peer, method: str, session_id: str = "a") -> list[Message]:
    events = (await peer.call("session.events", session_id=session_id, since=0))["events"]
    return [event for event in events if event["method"] == method]


async def ends(peer: Peer) -> list[tuple[str, str | None]]:
    """Status and reason of each compaction that finished; each that started has."""
    finished = await events_of(peer, "compaction.finished")
    started = await events_of(peer, "compaction.started")
    assert [e["operation_id"] for e in finished] == [e["operation_id"] for e in started]
    return [(e["status"], e.get("reason")) for e in finished]


async def check_archives(peer: Peer, folder: Path, session_id: str = "a") -> None:
    """Every archived revision is whole, and there is no file that none of them names."""
    revisions = (await peer.call("session.revisions", session_id=session_id))["revisions"]
    for revision in revisions:
        number = revision["revision"]
        assert len(await peer.entries(session_id, revision=number)) == revision["entries"]
    assert archives_in(folder) == len(revisions)


def archives_in(folder: Path) -> int:
    return len([path for path in (folder / "data" / "archives").rglob("*") if path.is_file()])


# Restore.


async def test_a_restore_brings_the_very_same_entries_back(peer: Peer, folder: Path) -> None:
    """PROTOCOL.md §3, `session.restore`: ids, times, bytes, provenance; the present is archived."""
    await peer.call("session.create", session_id="a", title="t", items=[user("x")])
    await peer.send(
        b'{"jsonrpc":"2.0","id":"odd","method":"session.append","params":'
        b'{"session_id":"a","items":[%b]}}\n' % ODD
    )
    await peer.result("odd")
    original = await raw_entries(peer, "a")
    assert ODD in original
    await peer.call("session.compact", session_id="a", operation_id="compact")
    await peer.call("session.append", session_id="a", items=[user("y")])
    reminded = await raw_entries(peer, "a")
    assert b'"reminder":{' in reminded
    before = (await peer.call("session.get", session_id="a", view="info"))["session"]
    result = await peer.call("session.restore", session_id="a", revision=2, operation_id="op")
    assert result == {
        "operation_id": "op",
        "session": {
            **before,
            "updated_at": result["session"]["updated_at"],
            "revision": 5,
            "generation": 2,
            "entries": 2,
            "tokens": result["tokens_after"],
            "archived_revisions": [4, 2],
        },
        "archived_revision": 4,
        "entries_before": 2,
        "entries_after": 2,
        "tokens_before": before["tokens"],
        "tokens_after": result["tokens_after"],
    }
    revisions = (await peer.call("session.revisions", session_id="a"))["revisions"]
    assert [(r["revision"], r["kind"], r["operation_id"]) for r in revisions] == [
        (4, "restore", "op"),
        (2, "compaction", "compact"),
    ]
    assert result["tokens_after"] == revisions[1]["tokens"]
    assert await raw_entries(peer, "a") == original == await raw_entries(peer, "a", revision=2)
    assert await raw_entries(peer, "a", revision=4) == reminded
    await peer.call("session.restore", session_id="a", revision=4)
    assert await raw_entries(peer, "a") == reminded
    await check_archives(peer, folder)


@either
async def test_each_is_told_once_with_its_kind(peer: Peer, method: str, params: Message) -> None:
    """PROTOCOL.md §4: exactly one `history.replaced` for each generation, with every member."""
    await compacted(peer)
    result = await peer.call(method, session_id="a", operation_id="op", **params)
    *_, event = await events_of(peer, "history.replaced")
    assert event == {
        "method": "history.replaced",
        "session_id": "a",
        "seq": event["seq"],
        "prev_seq": event["seq"] - 1,
        "revision": 4,
        "generation": 2,
        "at": event["at"],
        "operation_id": "op",
        "kind": method.removeprefix("session."),
        "from_generation": 1,
        "to_generation": 2,
        "archived_revision": 3,
        "entries_before": 2,
        "entries_after": len(await peer.entries("a")),
        "tokens_before": result["tokens_before"],
        "tokens_after": result["tokens_after"],
        "retained_entry_ids": [entry["id"] for entry in await peer.entries("a")],
        "reminder_entry_id": None,
        "carried_over": 0,
    }
    generations = [e["to_generation"] for e in await events_of(peer, "history.replaced")]
    assert generations == [1, 2]


@either
async def test_entry_ids_are_never_used_again(peer: Peer, method: str, params: Message) -> None:
    """PROTOCOL.md §2: rising with allocation, also where later entries are gone."""
    await compacted(peer)
    await peer.call(method, session_id="a", **params)
    appended = await peer.call("session.append", session_id="a", items=[user("x")])
    assert appended["entry_ids"] == [5]
    await peer.call("session.rewind", session_id="a", after_entry_id=0)
    appended = await peer.call("session.append", session_id="a", items=[user("x")])
    assert appended["entry_ids"] == [6]


async def test_a_restore_of_the_present_revision_changes_nothing(peer: Peer) -> None:
    """docs/protocol.md §5: no empty generation, no archive, no event; but it is recorded."""
    await compacted(peer)
    before = await look(peer), await peer.call("session.events", session_id="a", since=0)
    result = await peer.call("session.restore", session_id="a", revision=3, operation_id="op")
    assert (result["archived_revision"], result["session"]["revision"]) == (None, 3)
    assert (await look(peer), await peer.call("session.events", session_id="a", since=0)) == before
    await peer.call("session.append", session_id="a", items=[user("x")])
    again = await peer.call("session.restore", session_id="a", revision=3, operation_id="op")
    assert again == {**result, "replayed": True}
    assert len(await peer.items("a")) == 3


async def test_a_revision_that_is_not_archived_cannot_be_restored(peer: Peer) -> None:
    """PROTOCOL.md §6, `revision_not_found`; 2 was never archived."""
    await compacted(peer)
    before = await look(peer)
    for revision in (0, 2, 4, 2**53):
        for method in ("session.restore", "session.fork"):
            with pytest.raises(RevisionNotFound) as caught:
                await peer.call(method, session_id="a", revision=revision)
            assert (caught.value.code, caught.value.data) == (1009, {"revision": revision})
    assert await look(peer) == before


async def test_a_call_that_came_back_can_be_answered(peer: Peer) -> None:
    """docs/protocol.md §2: `warnings` go by the present history."""
    await peer.call("session.create", session_id="a", items=[CALL, OUTPUT, user("x")])
    await peer.call("session.compact", session_id="a")
    appended = await peer.call("session.append", session_id="a", items=[OUTPUT])
    assert len(appended["warnings"]) == 1
    await peer.call("session.restore", session_id="a", revision=1)
    await peer.call("session.rewind", session_id="a", after_entry_id=1)
    appended = await peer.call("session.append", session_id="a", items=[OUTPUT])
    assert appended["warnings"] == []
    await peer.call("session.rewind", session_id="a", after_entry_id=0)
    appended = await peer.call("session.append", session_id="a", items=[OUTPUT])
    assert len(appended["warnings"]) == 1


async def test_a_long_history_comes_back_while_others_are_served(
    daemon: Daemon, peer: Peer
) -> None:
    """DESIGN.md: the event loop goes on between slices of a history."""
    await peer.call("session.create", session_id="a")
    for start in range(0, 10_000, 1000):
        items = [user(f"{number} " + "word " * 20) for number in range(start, start + 1000)]
        await peer.call("session.append", session_id="a", items=items)
    original = await raw_entries(peer, "a", limit=10_000, max_bytes=1 << 23)
    await peer.call("session.rewind", session_id="a", after_entry_id=0)
    pings = 0
    answered = anyio.Event()

    async def ping(other: Peer) -> None:
        nonlocal pings
        while not answered.is_set():
            await other.call("protocol.ping")
            pings += 1

    async with daemon.connect() as other, anyio.create_task_group() as tasks:
        tasks.start_soon(ping, other)
        try:
            await peer.call("session.restore", session_id="a", revision=10)
        finally:
            answered.set()
    assert pings > 2  # more than one within it, on however slow a machine
    assert await raw_entries(peer, "a", limit=10_000, max_bytes=1 << 23) == original


# Rewind.


async def test_a_rewind_drops_what_came_later(peer: Peer, folder: Path) -> None:
    """PROTOCOL.md §3, `session.rewind`: the present history is archived first."""
    items = [user(f"{number}" * 40) for number in range(5)]
    await peer.call("session.create", session_id="a", items=items)
    original = await raw_entries(peer, "a")
    before = (await peer.call("session.get", session_id="a"))["session"]
    result = await peer.call("session.rewind", session_id="a", after_entry_id=2)
    assert len(result["operation_id"]) > 8
    assert (result["archived_revision"], result["entries_before"], result["entries_after"]) == (
        *(1, 5, 2),
    )
    assert result["tokens_before"] == before["tokens"]
    assert result["tokens_after"]["count"] * 5 == before["tokens"]["count"] * 2
    assert result["session"]["tokens"] == result["tokens_after"]
    assert await peer.items("a") == items[:2]
    (revision,) = (await peer.call("session.revisions", session_id="a"))["revisions"]
    assert (revision["kind"], revision["operation_id"]) == ("rewind", result["operation_id"])
    await peer.call("session.restore", session_id="a", revision=1)
    assert await raw_entries(peer, "a") == original
    result = await peer.call("session.rewind", session_id="a", after_entry_id=0)
    assert (result["session"]["entries"], result["session"]["generation"]) == (0, 3)
    assert result["tokens_after"] == {"count": 0, "method": "o200k_base", "exact": True}
    assert await peer.items("a") == []
    await check_archives(peer, folder)


async def test_a_rewind_goes_by_the_order_of_the_history(peer: Peer) -> None:
    """docs/protocol.md §2: after a compaction the order need not be that of the ids."""
    items: list[Message] = [user("x"), {"role": "system", "content": "be brief"}, CALL]
    await peer.call("session.create", session_id="a", items=items)
    await peer.call("session.compact", session_id="a")
    assert [entry["id"] for entry in await peer.entries("a")] == [2, 4, 3]
    await peer.call("session.rewind", session_id="a", after_entry_id=4)
    assert [entry["id"] for entry in await peer.entries("a")] == [2, 4]


async def test_a_rewind_to_the_last_entry_changes_nothing(peer: Peer) -> None:
    """docs/protocol.md §5: recorded for its operation, so that a late repetition is harmless."""
    await compacted(peer)
    before = await look(peer), await peer.call("session.events", session_id="a", since=0)
    result = await peer.call("session.rewind", session_id="a", after_entry_id=4, operation_id="op")
    assert (result["archived_revision"], result["entries_before"], result["entries_after"]) == (
        *(None, 2, 2),
    )
    assert result["session"] == (await peer.call("session.get", session_id="a"))["session"]
    assert (await look(peer), await peer.call("session.events", session_id="a", since=0)) == before
    await peer.call("session.append", session_id="a", items=[user("x")])
    again = await peer.call("session.rewind", session_id="a", after_entry_id=4, operation_id="op")
    assert again == {**result, "replayed": True}
    assert len(await peer.items("a")) == 3
    await peer.call("session.create", session_id="empty")
    result = await peer.call("session.rewind", session_id="empty", after_entry_id=0)
    assert result["archived_revision"] is None


async def test_an_entry_that_the_history_does_not_have_is_not_found(peer: Peer) -> None:
    """docs/protocol.md §5; 1 is archived, 5 was never there."""
    await compacted(peer)
    before = await look(peer)
    for entry_id in (1, 5, 2**53):
        for method in ("session.rewind", "session.fork"):
            with pytest.raises(NotFound) as caught:
                await peer.call(method, session_id="a", after_entry_id=entry_id)
            assert caught.value.data == {"what": "entry"}
    answer = await peer.answer(await peer.ask("session.rewind", session_id="a", after_entry_id=-1))
    assert answer["error"]["data"]["reason"] == "invalid_params"
    assert await look(peer) == before
    assert len((await peer.call("session.list"))["sessions"]) == 1


# Beside a compaction.


@either
@pytest.mark.parametrize("waits", [True, False])
async def test_a_running_compaction_ends_as_superseded(
    daemon: Daemon, peer: Peer, gate: Gate, folder: Path, method: str, params: Message, waits: bool
) -> None:
    """PROTOCOL.md §5: nothing written by it, and one `finished`; its early archive has the same
    name as the one that is written instead.
    """
    gate.open()
    await compacted(peer)
    gate.close()
    live = await raw_entries(peer, "a")
    compact = await peer.ask("session.compact", session_id="a", operation_id="second", wait=waits)
    await gate.reached(2)
    async with daemon.connect() as other:
        await other.until(lambda _: archives_in(folder) == 2, "protocol.ping")
        result = await other.call(method, session_id="a", **params)
    assert result["archived_revision"] == 3
    assert gate.left == 2
    if waits:
        with pytest.raises(Superseded) as caught:
            await peer.result(compact)
        assert caught.value.retryable is True
    else:
        await peer.result(compact)
    operation = (await peer.call("operation.get", operation_id="second"))["operation"]
    assert operation["status"] == "failed"
    assert operation["error"]["data"]["reason"] == "superseded"
    assert await ends(peer) == [("completed", None), ("failed", "superseded")]
    assert await raw_entries(peer, "a", revision=3) == live
    await check_archives(peer, folder)
    gate.open()
    again = await peer.call("session.compact", session_id="a", force=True)
    assert (again["archived_revision"], again["session"]["generation"]) == (4, 3)
    await check_archives(peer, folder)


@either
@pytest.mark.parametrize("written", [False, True])
async def test_an_early_archive_that_is_being_written_is_waited_for(
    start: Start,
    gate: Gate,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    params: Message,
    written: bool,
) -> None:
    """It would be put in the place of the one that the revision names, or removed from there."""
    archive = SqliteStore.archive
    reached, may_go_on = anyio.Event(), anyio.Event()
    kinds: list[Kind] = []

    async def slow(self: SqliteStore, session: Session, kind: Kind, operation_id: str) -> Revision:
        kinds.append(kind)
        if operation_id != "second":
            return await archive(self, session, kind, operation_id)
        if written:
            made = await archive(self, session, kind, operation_id)
            reached.set()
            await may_go_on.wait()
            return made
        reached.set()
        await may_go_on.wait()
        return await archive(self, session, kind, operation_id)

    gate.open()
    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await compacted(peer)
        gate.close()
        live = await raw_entries(peer, "a")
        monkeypatch.setattr(SqliteStore, "archive", slow)
        try:
            await peer.call("session.compact", session_id="a", operation_id="second", wait=False)
            with anyio.fail_after(WAIT_S):
                await reached.wait()
            change = await other.ask(method, session_id="a", **params)
            for _ in range(20):
                await peer.call("session.list")
            assert kinds == ["compaction"]
        finally:
            may_go_on.set()
        assert (await other.result(change))["archived_revision"] == 3
        assert kinds == ["compaction", method.removeprefix("session.")]
        assert await ends(peer) == [("completed", None), ("failed", "superseded")]
        assert await raw_entries(peer, "a", revision=3) == live
        await check_archives(peer, folder)


@either
async def test_a_compaction_that_waits_for_its_commit_is_superseded(
    start: Start,
    gate: Gate,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    params: Message,
) -> None:
    """It has its place behind the change, in the mailbox of the session."""
    replayed = SqliteStore.replayed
    reached, may_go_on = anyio.Event(), anyio.Event()

    async def slow(self: SqliteStore, receipt: Receipt) -> Replayed | None:
        reached.set()
        await may_go_on.wait()
        return await replayed(self, receipt)

    gate.open()
    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await compacted(peer)
        gate.close()
        monkeypatch.setattr(SqliteStore, "replayed", slow)
        try:
            compact = await peer.ask("session.compact", session_id="a", operation_id="second")
            await gate.reached(2)
            change = await other.ask(method, session_id="a", **params)
            with anyio.fail_after(WAIT_S):
                await reached.wait()
            gate.open()
            for _ in range(20):
                await peer.call("session.list")
            assert gate.left == 2
        finally:
            may_go_on.set()
        await other.result(change)
        with pytest.raises(Superseded):
            await peer.result(compact)
        assert await ends(peer) == [("completed", None), ("failed", "superseded")]
        await check_archives(peer, folder)


async def test_a_compaction_that_is_being_committed_comes_first(
    start: Start, folder: Path, hold_commits: HoldCommits
) -> None:
    """DESIGN.md §1: one after the other in the session's actor; both are there."""
    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await compacted(peer)
        held = hold_commits()
        try:
            compact = await peer.ask("session.compact", session_id="a")
            with anyio.fail_after(WAIT_S):
                await held.reached.wait()
            restore = await other.ask("session.restore", session_id="a", revision=1)
            await other.call("protocol.ping")
        finally:
            held.go.set()
        assert (await peer.result(compact))["session"]["generation"] == 2
        result = await other.result(restore)
        assert (result["archived_revision"], result["session"]["generation"]) == (4, 3)
        assert await peer.items("a") == [user("one"), user("two")]
        assert await ends(peer) == [("completed", None)] * 2
        await check_archives(peer, folder)


async def test_what_is_refused_leaves_a_running_compaction_alone(
    peer: Peer, daemon: Daemon, gate: Gate, folder: Path
) -> None:
    """docs/protocol.md §5: only a change that is about to be made ends it."""
    gate.open()
    await compacted(peer)
    gate.close()
    compact = await peer.ask("session.compact", session_id="a")
    await gate.reached(2)
    async with daemon.connect() as other:
        for method, params, error in (
            ("session.restore", {"revision": 2}, RevisionNotFound),
            ("session.rewind", {"after_entry_id": 1}, NotFound),
            ("session.rewind", {"after_entry_id": 3, "expected_revision": 2}, Conflict),
        ):
            with pytest.raises(error):
                await other.call(method, session_id="a", **params)
        result = await other.call("session.rewind", session_id="a", after_entry_id=4)
        assert result["archived_revision"] is None
        first = await other.call("session.revisions", session_id="a")
        (path,) = (p for p in (folder / "data" / "archives").rglob("1.*"))
        path.rename(path.with_name("elsewhere"))
        with pytest.raises(ArchiveMissing):
            await other.call("session.restore", session_id="a", revision=1)
        path.with_name("elsewhere").rename(path)
        assert await other.call("session.revisions", session_id="a") == first
        fork = await other.call("session.fork", session_id="a", new_session_id="b")
        assert fork["session"]["busy"] is False
    gate.open()
    assert (await peer.result(compact))["session"]["generation"] == 2
    assert await ends(peer) == [("completed", None)] * 2


async def test_changes_at_every_moment_of_a_compaction_lose_nothing(
    daemon: Daemon, peer: Peer, folder: Path
) -> None:
    """PROTOCOL.md §5; every archive is the history that it should be, and no file is left over."""
    await peer.call("session.create", session_id="a", items=[user("0")])
    known: dict[int, bytes] = {}
    async with daemon.connect() as other:
        for turn in range(40):
            await peer.call("session.append", session_id="a", items=[user(f"{turn} " * 200)])
            session = (await peer.call("session.get", session_id="a", view="info"))["session"]
            revision = session["revision"]
            known[revision] = await raw_entries(peer, "a")
            compact = await peer.ask("session.compact", session_id="a", force=True)
            for _ in range(turn % 20):
                await other.call("protocol.ping")
            method, params = ("session.restore", {"revision": 2}) if turn % 2 else REWIND_TO_NONE
            result = await other.call(method, session_id="a", **params)
            answer = await peer.answer(compact)
            if "error" in answer:
                assert answer["error"]["data"]["reason"] == "superseded"
                assert result["archived_revision"] == revision
            present = (await peer.call("session.get", session_id="a", view="info"))["session"]
            replaced = await events_of(peer, "history.replaced")
            generations = [event["to_generation"] for event in replaced]
            assert generations == list(range(1, present["generation"] + 1))
            for archived in present["archived_revisions"]:
                if archived in known:
                    assert await raw_entries(peer, "a", revision=archived) == known[archived]
    assert {reason for _, reason in await ends(peer)} <= {None, "superseded"}
    await check_archives(peer, folder)


# When the disk fails.


@either
@pytest.mark.parametrize("where", ["archive", "replace"])
async def test_a_change_that_cannot_be_stored_leaves_everything_as_it_was(
    start: Start,
    gate: Gate,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    params: Message,
    where: str,
) -> None:
    """DESIGN.md promise 13: no archive is left that nobody names; the same request succeeds later.

    A compaction that ran is over, by then (docs/protocol.md §5).
    """
    failing = False
    replace = Ledger.replace

    def replace_fails(self: Ledger, session_id: str, change: Replacement, render: Any) -> Any:
        if failing and change.archive.kind != "compaction":
            raise OSError(errno.ENOSPC, "no space")
        return replace(self, session_id, change, render)

    def archive_fails(*_: object) -> None:
        if failing:
            raise OSError(errno.ENOSPC, "no space")

    gate.open()
    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await compacted(peer)
        before = await look(peer)
        gate.close()
        compact = await other.ask("session.compact", session_id="a", operation_id="second")
        await gate.reached(2)
        await peer.until(lambda _: archives_in(folder) == 2, "protocol.ping")
        failing = True
        if where == "replace":
            monkeypatch.setattr(Ledger, "replace", replace_fails)
        else:
            monkeypatch.setattr("recapd.storage.archive._write", archive_fails)
        with pytest.raises(StorageFull):
            await peer.call(method, session_id="a", operation_id="op", **params)
        with pytest.raises(Superseded):
            await other.result(compact)
        assert await look(peer) == before
        assert archives_in(folder) == 1
        with pytest.raises(NotFound):
            await peer.call("operation.get", operation_id="op")
        failing = False
        monkeypatch.undo()
        result = await peer.call(method, session_id="a", operation_id="op", **params)
        assert "replayed" not in result
        assert await ends(peer) == [("completed", None), ("failed", "superseded")]
        await check_archives(peer, folder)


@either
@pytest.mark.parametrize("made", [True, False])
async def test_an_unknown_outcome_keeps_the_archive_and_is_found_by_repeating(
    start: Start,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    params: Message,
    made: bool,
) -> None:
    """PROTOCOL.md §6, `outcome_unknown`: the row may be there, so the file must stay."""
    replace = SqliteStore.replace

    def unknown(self: SqliteStore, *arguments: Any, **options: Any) -> Any:
        pending = replace(self, *arguments, **options) if made else None

        class Lost:
            async def wait(self) -> None:
                if pending is not None:
                    await pending.wait()
                raise StoreOutcomeUnknown

        return Lost()

    async with start() as daemon, daemon.connect() as peer:
        await compacted(peer)
        live = await raw_entries(peer, "a")
        with monkeypatch.context() as patch:
            patch.setattr(SqliteStore, "replace", unknown)
            with pytest.raises(OutcomeUnknown):
                await peer.call(method, session_id="a", operation_id="op", **params)
        assert archives_in(folder) == 2
        result = await peer.call(method, session_id="a", operation_id="op", **params)
        assert result.get("replayed", False) is made
        assert result["session"]["generation"] == 2
        assert await raw_entries(peer, "a", revision=3) == live
        await check_archives(peer, folder)


# Cancelling, and order.


@either
@pytest.mark.promise("D9")
async def test_cancels_at_every_moment_leave_all_or_nothing(
    daemon: Daemon, peer: Peer, folder: Path, method: str, params: Message
) -> None:
    """DESIGN.md promise 2: one answer each, and it is true."""
    await compacted(peer)
    live = await raw_entries(peer, "a")
    cancelled = 0
    for turn in range(30):
        change = await peer.ask(method, session_id="a", operation_id=f"op-{turn}", **params)
        for _ in range(turn % 15):
            await peer.call("protocol.ping")
        await peer.say(notification("$/cancelRequest", id=change))
        answer = await peer.answer(change)
        session = (await peer.call("session.get", session_id="a"))["session"]
        if "error" in answer:
            assert answer["error"]["data"]["reason"] == "request_cancelled"
            assert await raw_entries(peer, "a") == live
            with pytest.raises(NotFound):
                await peer.call("operation.get", operation_id=f"op-{turn}")
            cancelled += 1
            continue
        assert answer["result"]["session"] == session
        with pytest.raises(AlreadyCommitted):
            await peer.call("operation.cancel", operation_id=f"op-{turn}")
        archived = answer["result"]["archived_revision"]
        assert await raw_entries(peer, "a", revision=archived) == live
        await peer.call("session.restore", session_id="a", revision=archived)
    assert cancelled > 0
    await check_archives(peer, folder)


async def test_a_cancel_that_comes_in_the_commit_is_answered_with_the_outcome(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/protocol.md §5: too late."""
    archive = SqliteStore.archive
    reached, may_go_on = anyio.Event(), anyio.Event()

    async def slow(self: SqliteStore, session: Session, kind: Kind, operation_id: str) -> Revision:
        reached.set()
        await may_go_on.wait()
        return await archive(self, session, kind, operation_id)

    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await compacted(peer)
        monkeypatch.setattr(SqliteStore, "archive", slow)
        try:
            restore = await peer.ask("session.restore", session_id="a", revision=1)
            with anyio.fail_after(WAIT_S):
                await reached.wait()
            late = await other.ask("session.append", session_id="a", items=[user("late")])
            await peer.say(notification("$/cancelRequest", id=restore))
            await peer.call("protocol.ping")
        finally:
            may_go_on.set()
        assert (await peer.result(restore))["session"]["generation"] == 2
        assert (await other.result(late))["entry_ids"] == [5]
        assert await peer.items("a") == [user("one"), user("two"), user("late")]


async def test_what_a_connection_sends_takes_effect_in_its_order(peer: Peer) -> None:
    """PROTOCOL.md §1: reads and appends before and behind a rewind, a restore and a fork."""
    requests: list[tuple[str, Message]] = [
        ("session.create", {"items": [user("1")]}),
        ("session.append", {"items": [user("2")]}),
        ("session.rewind", {"after_entry_id": 1}),
        ("session.append", {"items": [user("3")]}),
        ("session.fork", {"new_session_id": "b"}),
        ("session.get", {}),
        ("session.restore", {"revision": 2}),
        ("session.append", {"items": [user("4")]}),
        ("session.get", {}),
    ]
    await peer.say(
        *(
            request(f"r{number}", method, session_id="a", **params)
            for number, (method, params) in enumerate(requests)
        )
    )
    results = [await peer.result(f"r{number}") for number in range(len(requests))]
    assert [entry["id"] for entry in results[5]["entries"]] == [1, 3]
    assert [entry["id"] for entry in results[8]["entries"]] == [1, 2, 4]
    assert [entry["id"] for entry in await peer.entries("b")] == [1, 3]


# Fork.


async def test_a_fork_is_a_session_with_the_same_entries(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.fork`; §2, `parent`; docs/protocol.md §5."""
    await peer.call(
        "session.create", session_id="a", title="t", cwd="/x", labels={"k": "v"}, items=[user("x")]
    )
    await peer.call("session.compact", session_id="a")
    await peer.call("session.append", session_id="a", items=[user("y")])
    source = (await peer.call("session.get", session_id="a"))["session"]
    before = await look(peer)
    result = await peer.call("session.fork", session_id="a", new_session_id="b", operation_id="op")
    at = result["session"]["created_at"]
    assert result == {
        "session": {
            **source,
            "session_id": "b",
            "created_at": at,
            "updated_at": at,
            "revision": 0,
            "generation": 0,
            "archived_revisions": [],
            "parent": {"session_id": "a", "revision": 3},
        }
    }
    assert await raw_entries(peer, "b") == await raw_entries(peer, "a")
    assert b'"reminder":{' in await raw_entries(peer, "b")
    events = (await peer.call("session.events", session_id="b", since=0))["events"]
    assert [(e["method"], e["revision"], e["operation_id"]) for e in events] == [
        ("session.created", 0, "op")
    ]
    assert await look(peer) == before
    appended = await peer.call("session.append", session_id="b", items=[user("z")])
    assert (appended["entry_ids"], appended["session"]["revision"]) == ([4], 1)
    listed = (await peer.call("session.list"))["sessions"]
    assert {s["session_id"]: s["parent"] for s in listed} == {
        "a": None,
        "b": {"session_id": "a", "revision": 3},
    }


async def test_a_fork_may_begin_in_the_past(peer: Peer) -> None:
    """PROTOCOL.md §3: an archived revision, up to an entry; ids go on above all of the source's."""
    items = [user("one"), user("two"), user("three")]
    await peer.call("session.create", session_id="a", title="t", items=items)
    await peer.call("session.compact", session_id="a")
    original = await raw_entries(peer, "a", revision=1)
    whole = (await peer.call("session.fork", session_id="a", revision=1, title="u"))["session"]
    (revision,) = (await peer.call("session.revisions", session_id="a"))["revisions"]
    assert (whole["title"], whole["tokens"]) == ("u", revision["tokens"])
    assert whole["parent"] == {"session_id": "a", "revision": 1}
    assert await raw_entries(peer, whole["session_id"]) == original
    part = (await peer.call("session.fork", session_id="a", revision=1, after_entry_id=2))[
        "session"
    ]
    assert (part["entries"], part["title"]) == (2, "t")
    assert 0 < part["tokens"]["count"] < revision["tokens"]["count"]
    assert await peer.items(part["session_id"]) == items[:2]
    none = (await peer.call("session.fork", session_id="a", after_entry_id=0))["session"]
    assert none["entries"] == 0
    for forked in (whole, part, none):
        appended = await peer.call(
            "session.append", session_id=forked["session_id"], items=[user("x")]
        )
        assert appended["entry_ids"] == [5]


@pytest.mark.parametrize("deleted", ["a", "b"])
async def test_either_of_the_two_stays_whole_without_the_other(start: Start, deleted: str) -> None:
    """Both have been changed and compacted since; also after a restart."""
    async with start() as daemon, daemon.connect() as peer:
        await compacted(peer)
        await peer.call("session.fork", session_id="a", revision=1, new_session_id="b")
        for name in "ab":
            await peer.call("session.compact", session_id=name, force=True)
            await peer.call("session.append", session_id=name, items=[user("more")])
        (kept,) = {"a", "b"} - {deleted}
        before = await look(peer, kept)
        histories = [
            await raw_entries(peer, kept, revision=revision)
            for revision in before[0]["session"]["archived_revisions"]
        ]
        await peer.call("session.delete", session_id=deleted)
        assert await look(peer, kept) == before
    async with start() as daemon, daemon.connect() as peer:
        assert await look(peer, kept) == before
        assert histories == [
            await raw_entries(peer, kept, revision=revision)
            for revision in before[0]["session"]["archived_revisions"]
        ]
        parent = before[0]["session"]["parent"]
        assert parent == (None if kept == "a" else {"session_id": "a", "revision": 1})
        await peer.call("session.restore", session_id=kept, revision=2 if kept == "b" else 1)


async def test_an_id_that_is_taken_cannot_be_forked_to(daemon: Daemon, peer: Peer) -> None:
    """PROTOCOL.md §6, `already_exists`; also its own, and two that want each other's."""
    await compacted(peer)
    await peer.call("session.create", session_id="b", items=[user("x")])
    before = await look(peer, "a"), await look(peer, "b")
    for name in "ab":
        with pytest.raises(AlreadyExists):
            await peer.call("session.fork", session_id="a", new_session_id=name)
    async with daemon.connect() as other:
        forks = [
            await one.ask("session.fork", session_id=source, new_session_id=new)
            for _ in range(5)
            for one, source, new in ((peer, "a", "b"), (other, "b", "a"))
        ]
        for one, fork in zip([peer, other] * 5, forks, strict=True):
            with pytest.raises(AlreadyExists):
                await one.result(fork)
    assert (await look(peer, "a"), await look(peer, "b")) == before


async def test_a_repeated_fork_is_the_same_session_though_its_source_is_gone(peer: Peer) -> None:
    """PROTOCOL.md §2, "Operation id": the server made the id of the new session."""
    await compacted(peer)
    first = await peer.call("session.fork", session_id="a", operation_id="op")
    await peer.call("session.delete", session_id="a")
    again = await peer.call("session.fork", session_id="a", operation_id="op")
    assert again == {**first, "replayed": True}
    assert len((await peer.call("session.list"))["sessions"]) == 1


async def test_forks_of_one_operation_at_once_are_one_session(daemon: Daemon, peer: Peer) -> None:
    """PROTOCOL.md §2, "Operation id", over several connections."""
    await compacted(peer)
    async with daemon.connect() as two, daemon.connect() as three:
        peers = (peer, two, three)
        ids = [await one.ask("session.fork", session_id="a", operation_id="op") for one in peers]
        results = [await one.result(id) for one, id in zip(peers, ids, strict=True)]
    assert len({result["session"]["session_id"] for result in results}) == 1
    assert len((await peer.call("session.list"))["sessions"]) == 2


async def test_a_fork_of_an_archived_session_is_active(start: Start) -> None:
    """docs/protocol.md §5: forking changes nothing of the source; durability is taken over."""
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", durability="transient", items=[user("x")])
        await peer.call("session.update", session_id="a", state="archived")
        fork = (await peer.call("session.fork", session_id="a", new_session_id="b"))["session"]
        assert (fork["state"], fork["durability"]) == ("active", "transient")
        await peer.call("session.append", session_id="b", items=[user("y")])
    async with start() as daemon, daemon.connect() as peer:
        with pytest.raises(RpcError):
            await peer.call("session.get", session_id="b")
