"""Compaction as a client sees it (PROTOCOL.md §3, §5); what the new history is made of is tested
in `compaction/`.
"""

import errno
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs
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
    Cancelled,
    CompactionError,
    CompactionFailed,
    CompactionRunning,
    Conflict,
    NotFound,
    NothingToCompact,
    ResultTooLarge,
    StorageFull,
    Superseded,
)
from recapd.storage.ledger import Ledger
from recapd.storage.sqlite import SqliteStore
from recapd.storage.store import Kind, Revision, Session

Start = Callable[..., AbstractAsyncContextManager[Daemon]]
HoldCommits = Callable[[], HeldCommit]

SYSTEM: Message = {"role": "system", "content": "be brief"}
DEVELOPER: Message = {"role": "developer", "content": [{"type": "input_text", "text": "use tabs"}]}


def reminder(text: str) -> Message:
    return user(f"<system-reminder>{text}</system-reminder>")


async def look(peer: Peer, session_id: str = "a") -> Any:
    """All of a session that a compaction may change, and must not when it fails."""
    read = await peer.call("session.get", session_id=session_id)
    del read["session"]["updated_at"]
    return read, await peer.call("session.revisions", session_id=session_id)


async def ends(peer: Peer, session_id: str = "a") -> list[tuple[str, str | None]]:
    """Status and reason of each compaction that finished; each that started has."""
    events = (await peer.call("session.events", session_id=session_id, since=0))["events"]
    started = [e["operation_id"] for e in events if e["method"] == "compaction.started"]
    finished = [e for e in events if e["method"] == "compaction.finished"]
    assert [e["operation_id"] for e in finished] == started
    return [(e["status"], e.get("reason")) for e in finished]


# What it answers.


async def test_a_compaction_replaces_the_history_and_says_what_it_did(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.compact`, and §5.4: every member of the result."""
    await peer.call("session.create", session_id="a", title="t")
    before = [SYSTEM, user("x" * 9000), reminder("old"), user("y " * 9000), DEVELOPER]
    await peer.call("session.append", session_id="a", items=before)
    old = await peer.entries("a")
    session = (await peer.call("session.get", session_id="a"))["session"]
    result = await peer.call("session.compact", session_id="a", operation_id="op")
    assert result == {
        "operation_id": "op",
        "status": "completed",
        "session": result["session"],
        "archived_revision": 1,
        "archive": result["archive"],
        "entries_before": 5,
        "entries_after": 4,
        "tokens_before": session["tokens"],
        "tokens_after": result["session"]["tokens"],
        "carried_over": 0,
        "reminder_entry_id": 6,
        "quality": "offline",
        "attempts": 0,
        "attempt_log": [],
        "redactions": {},
    }
    assert (result["archive"]["entries"], len(result["archive"]["sha256"])) == (5, 64)
    assert result["tokens_after"]["exact"] is True
    assert result["tokens_after"]["count"] < result["tokens_before"]["count"]
    assert result["session"] == {
        **session,
        "updated_at": result["session"]["updated_at"],
        "revision": 2,
        "generation": 1,
        "entries": 4,
        "tokens": result["tokens_after"],
        "archived_revisions": [1],
        "busy": False,
    }
    new = await peer.entries("a")
    assert [entry["id"] for entry in new] == [1, 5, 3, 6]
    assert new[:3] == [old[0], old[4], old[2]]
    assert new[3]["reminder"] == {"generation": 1, "operation_id": "op", "archived_revision": 1}
    assert new[3]["item"]["role"] == "user"
    text = new[3]["item"]["content"][0]["text"]
    assert text.startswith("<system-reminder>")
    assert text.endswith("</system-reminder>")
    assert await peer.entries("a", revision=1) == old


async def test_without_waiting_the_operation_is_named_at_once(peer: Peer, gate: Gate) -> None:
    """PROTOCOL.md §3: `wait: false` answers at once; `operation.get` tells how it ended."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    answer = await peer.call("session.compact", session_id="a", wait=False)
    assert (answer["status"], answer["session"]["busy"]) == ("running", True)
    assert set(answer) == {"operation_id", "status", "session"}
    operation_id = answer["operation_id"]
    operation = (await peer.call("operation.get", operation_id=operation_id))["operation"]
    assert (operation["status"], operation["method"]) == ("running", "session.compact")
    assert not {"ended_at", "result", "error"} & operation.keys()
    wait = await peer.ask("operation.get", operation_id=operation_id, wait_ms=600_000)
    short = await peer.call("operation.get", operation_id=operation_id, wait_ms=10)
    assert short["operation"]["status"] == "running"
    gate.open()
    operation = (await peer.result(wait))["operation"]
    assert operation["status"] == "completed"
    assert operation["result"]["operation_id"] == operation_id
    assert operation["result"]["session"]["generation"] == 1
    assert (await peer.call("session.get", session_id="a"))["session"]["busy"] is False


async def test_a_repetition_without_waiting_tells_that_it_runs(peer: Peer, gate: Gate) -> None:
    """PROTOCOL.md §2: the same id and parameters again."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    params: Message = {"session_id": "a", "wait": False, "operation_id": "op"}
    first = await peer.call("session.compact", **params)
    await gate.reached()
    again = await peer.call("session.compact", **params)
    assert again == {**first, "replayed": True} or again == first
    gate.open()
    await peer.call("operation.get", operation_id="op", wait_ms=10_000)
    done = await peer.call("session.compact", **params)
    assert (done["status"], done["replayed"]) == ("completed", True)
    assert gate.entered == 1


async def test_a_given_summary_is_used_as_it_is(peer: Peer) -> None:
    """PROTOCOL.md §5: give `summary` yourself and no model is asked."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    result = await peer.call("session.compact", session_id="a", summary="  We did \U0001f600.\n")
    assert result["quality"] == "client"
    (entry,) = await peer.entries("a")
    assert "\n\nWe did \U0001f600.\n\nEvidence, " in entry["item"]["content"][0]["text"]
    for summary in ("", " \n\t"):
        with pytest.raises(CompactionFailed) as caught:
            await peer.call("session.compact", session_id="a", summary=summary)
        assert (caught.value.code, caught.value.data["stage"]) == (1008, "accept")
    answer = await peer.answer(
        await peer.ask("session.compact", session_id="a", summary="x", summarizer="offline")
    )
    assert answer["error"]["data"]["reason"] == "invalid_params"
    offline = await peer.call("session.compact", session_id="a", summarizer="offline", force=True)
    assert offline["quality"] == "offline"


async def test_recent_entries_can_be_kept(peer: Peer) -> None:
    """PROTOCOL.md §5.1: `keep_recent_tokens`, as many of the latest groups as fit."""
    call: Message = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output: Message = {"type": "function_call_output", "call_id": "c", "output": "done"}
    items = [user("x " * 400), call, output, user("last")]
    await peer.call("session.create", session_id="a", items=items)
    result = await peer.call("session.compact", session_id="a", keep_recent_tokens=100)
    entries = await peer.entries("a")
    assert [entry["id"] for entry in entries] == [5, 2, 3, 4]
    assert [entry["item"] for entry in entries[1:]] == items[1:]
    assert result["carried_over"] == 0
    with pytest.raises(NothingToCompact):
        await peer.call("session.compact", session_id="a", keep_recent_tokens=100_000)


@pytest.mark.parametrize(
    "items", [[], [SYSTEM], [SYSTEM, DEVELOPER, reminder("x")], [reminder("x")] * 12]
)
async def test_nothing_to_compact_is_said_and_can_be_forced(
    peer: Peer, items: list[Message]
) -> None:
    """PROTOCOL.md §5.5; an empty history gets no first instruction."""
    await peer.call("session.create", session_id="a", items=items)
    before = await look(peer)
    with pytest.raises(NothingToCompact) as caught:
        await peer.call("session.compact", session_id="a")
    assert caught.value.code == 1008
    assert await look(peer) == before
    assert await ends(peer) == [("skipped", "nothing_to_compact")]
    result = await peer.call("session.compact", session_id="a", force=True)
    assert result["reminder_entry_id"] == len(items) + 1
    kept = [item for item in items if item in (SYSTEM, DEVELOPER)] + [
        item for item in items if item not in (SYSTEM, DEVELOPER)
    ][-10:]
    assert (await peer.items("a"))[:-1] == kept
    assert await peer.items("a", revision=result["archived_revision"]) == items


async def test_a_result_over_the_limit_leaves_everything_as_it_was(start: Start) -> None:
    """PROTOCOL.md §5.3: with the numbers; no id is allocated (BUGLOG B06)."""
    async with start(context_limit=100) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x"), user("y")])
        before = await look(peer)
        with pytest.raises(ResultTooLarge) as caught:
            await peer.call("session.compact", session_id="a", summary="word " * 200)
        assert caught.value.data["context_limit"] == 100
        assert caught.value.data["tokens"] > 200
        parts = caught.value.data["parts"]
        assert sum(parts.values()) >= caught.value.data["tokens"] - 10
        assert parts["summary"] > 200
        assert await look(peer) == before
        assert await ends(peer) == [("failed", "result_too_large")]
        appended = await peer.call("session.append", session_id="a", items=[user("z")])
        assert appended["entry_ids"] == [3]
        result = await peer.call("session.compact", session_id="a", summary="short")
        assert result["reminder_entry_id"] == 4
        assert result["session"]["generation"] == 1


async def test_secrets_do_not_reach_a_summary(start: Start) -> None:
    """PROTOCOL.md §7: redacted and counted, unless configured otherwise; the archive has them."""
    key = "AKIA" + "ABCDEFGH12345678"
    items = [user(f"my key is {key}")]
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=items)
        result = await peer.call("session.compact", session_id="a")
        assert result["redactions"] == {"aws_key_id": 1}
        assert key not in json.dumps(await peer.items("a"))
        assert await peer.items("a", revision=1) == items
    async with start(redact_summary_source=False) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="b", items=items)
        result = await peer.call("session.compact", session_id="b")
        assert result["redactions"] == {}
        assert key in json.dumps(await peer.items("b"))


@pytest.mark.parametrize("characters", range(1000, 1011))
async def test_a_shortened_text_is_never_cut_through_a_character(
    start: Start, characters: int
) -> None:
    """BUGLOG B44: 100 kB of emoji in a tool output, shortened at every offset."""
    output = "\U0001f469\u200d\U0001f4bb" * 10_000
    items: list[Message] = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": output},
    ]
    async with start(summary_characters_max=characters) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=items)
        await peer.call("session.compact", session_id="a")
        await peer.say(request("raw", "session.get", session_id="a"))
        frame = await peer.frame()
        assert b"\\ud8" not in frame
        (entry,) = json.loads(frame.decode("utf-8", "strict"))["result"]["entries"]
        text = entry["item"]["content"][0]["text"]
        text.encode()
        assert len(text) < characters + 200
        assert await peer.items("a", revision=1) == items


# What stays.


async def test_start_instructions_are_there_once_after_many_compactions(peer: Peer) -> None:
    """BUGLOG B09: in the first order, with the same ids and bytes."""
    instructions: list[Message] = [SYSTEM, DEVELOPER, {"role": "system", "content": "second"}]
    await peer.call("session.create", session_id="a", items=[*instructions, user("x")])
    first = (await peer.entries("a"))[:3]
    for turn in range(5):
        await peer.call("session.compact", session_id="a")
        entries = await peer.entries("a")
        assert entries[:3] == first
        roles = [entry["item"]["role"] for entry in entries]
        assert sum(role in ("system", "developer") for role in roles) == 3
        await peer.call("session.append", session_id="a", items=[user(f"turn {turn}")])


async def test_at_most_ten_reminders_and_the_new_one_are_kept(peer: Peer) -> None:
    """PROTOCOL.md §5.4; BUGLOG B14: fifteen compactions, the latest, oldest first."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    made: list[int] = []
    for _ in range(15):
        result = await peer.call("session.compact", session_id="a")
        made.append(result["reminder_entry_id"])
        entries = await peer.entries("a")
        assert [entry["id"] for entry in entries] == made[-11:]
        await peer.call("session.append", session_id="a", items=[user("x")] * 3)


async def test_a_session_keeps_its_identity(daemon: Daemon, peer: Peer) -> None:
    """BUGLOG B24: id, creation time and title; one entry in the list."""
    await peer.call("session.create", session_id="a", title="t", items=[user("x")])
    before = (await peer.call("session.list"))["sessions"]
    for _ in range(2):
        await peer.call("session.compact", session_id="a", force=True)
    (after,) = (await peer.call("session.list"))["sessions"]
    for name in ("session_id", "title", "created_at", "cwd", "labels"):
        assert after[name] == before[0][name]
    assert after["archived_revisions"] == [2, 1]


async def test_a_call_that_is_open_keeps_its_place(peer: Peer) -> None:
    """PROTOCOL.md §5.1; BUGLOG B21: never a live history with an output without its call."""
    call: Message = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output: Message = {"type": "function_call_output", "call_id": "c", "output": "late"}
    await peer.call("session.create", session_id="a", items=[user("x"), call])
    await peer.call("session.compact", session_id="a")
    assert (await peer.items("a"))[1:] == [call]
    appended = await peer.call("session.append", session_id="a", items=[output])
    assert appended["warnings"] == []
    assert (await peer.items("a"))[1:] == [call, output]


async def test_what_is_stored_grows_with_what_was_appended(peer: Peer, folder: Path) -> None:
    """BUGLOG B19: linear in the items, not in items by compactions."""

    def size_bytes() -> int:
        files = [path for path in (folder / "data").rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files if not path.name.endswith(("wal", "shm")))

    await peer.call("session.create", session_id="a")
    sizes: list[int] = []
    for turn in range(30):
        items = [user(f"{turn} {number} " + f"{number * turn:x}" * 100) for number in range(20)]
        await peer.call("session.append", session_id="a", items=items)
        await peer.call("session.compact", session_id="a", summary=f"turn {turn}")
        sizes.append(size_bytes())
    first, second = sizes[14] - sizes[0], sizes[29] - sizes[15]
    assert second < 2 * first + 200_000
    assert sizes[29] < 3_000_000


# While it runs.


async def test_what_is_appended_meanwhile_is_carried_over_in_order(
    daemon: Daemon, peer: Peer, gate: Gate
) -> None:
    """PROTOCOL.md §5.4; DESIGN.md promise 8: kept, in order, once."""
    call: Message = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output: Message = {"type": "function_call_output", "call_id": "c", "output": "done"}
    await peer.call("session.create", session_id="a", items=[SYSTEM, user("x"), call])
    compact = await peer.ask("session.compact", session_id="a")
    await gate.reached()
    late: list[Message] = [output, DEVELOPER, user("one"), reminder("late"), user("two")]
    async with daemon.connect() as other:
        for number, item in enumerate(late):
            appended = await (peer, other)[number % 2].call(
                "session.append", session_id="a", items=[item]
            )
            assert appended["entry_ids"] == [4 + number]
            assert appended["warnings"] == []
    await peer.call("session.update", session_id="a", title="renamed")
    gate.open()
    result = await peer.result(compact)
    assert result["carried_over"] == 5
    assert result["archived_revision"] == 6
    assert result["entries_before"] == 8
    assert result["session"]["title"] == "renamed"
    entries = await peer.entries("a")
    assert [entry["id"] for entry in entries] == [1, 9, 3, 4, 5, 6, 7, 8]
    assert [entry["item"] for entry in entries[3:]] == late
    archived = await peer.items("a", revision=6)
    assert archived == [SYSTEM, user("x"), call, *late]
    assert (await peer.call("session.append", session_id="a", items=[user("z")]))["entry_ids"] == [
        10
    ]


async def test_tokens_after_count_what_was_carried_over(peer: Peer, gate: Gate) -> None:
    """BUGLOG B07: the figure is of the new history."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    compact = await peer.ask("session.compact", session_id="a")
    await gate.reached()
    await peer.call("session.append", session_id="a", items=[user("word " * 1000)])
    gate.open()
    result = await peer.result(compact)
    assert result["tokens_after"]["count"] > 1000
    assert result["tokens_after"]["exact"] is False
    assert result["session"]["tokens"] == result["tokens_after"]


async def test_a_second_compaction_is_refused_and_told_which_one_runs(
    peer: Peer, gate: Gate
) -> None:
    """PROTOCOL.md §5; §6, `compaction_running`."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    compact = await peer.ask("session.compact", session_id="a", operation_id="first")
    await gate.reached()
    with pytest.raises(CompactionRunning) as caught:
        await peer.call("session.compact", session_id="a", operation_id="second")
    assert (caught.value.code, caught.value.data) == (1007, {"operation_id": "first"})
    assert caught.value.retryable is True
    with pytest.raises(NotFound):
        await peer.call("operation.get", operation_id="second")
    gate.open()
    await peer.result(compact)
    again = await peer.call("session.compact", session_id="a", operation_id="second", force=True)
    assert again["session"]["generation"] == 2


async def test_of_eight_compactions_at_once_one_is_made(daemon: Daemon, gate: Gate) -> None:
    """BUGLOG B13: over four connections; one summary, one archive, one asking."""
    async with (
        daemon.connect() as one,
        daemon.connect() as two,
        daemon.connect() as three,
        daemon.connect() as four,
    ):
        await one.call("session.create", session_id="a", items=[user("x")])
        peers = [one, two, three, four] * 2
        ids = [await peer.ask("session.compact", session_id="a") for peer in peers]
        await gate.reached()
        for peer in peers[:4]:  # a read is answered when what came before it has its place, or none
            await peer.call("session.get", session_id="a", view="info")
        answers: list[Message] = []
        async with anyio.create_task_group() as tasks:

            async def take(peer: Peer, wanted: list[int]) -> None:
                answers.extend([await peer.answer(id) for id in wanted])

            for number, peer in enumerate(peers[:4]):
                tasks.start_soon(take, peer, [ids[number], ids[number + 4]])
            gate.open()
        results = [answer["result"] for answer in answers if "result" in answer]
        refused = [answer["error"]["data"] for answer in answers if "error" in answer]
        assert (len(results), len(refused)) == (1, 7)
        for data in refused:
            assert data["reason"] == "compaction_running"
            assert data["operation_id"] == results[0]["operation_id"]
        assert gate.entered == 1
        assert len((await one.call("session.revisions", session_id="a"))["revisions"]) == 1


async def test_two_sessions_are_compacted_side_by_side(peer: Peer, gate: Gate) -> None:
    """DESIGN.md §1: summarising holds no actor, and one session is not another."""
    ids: list[int] = []
    for name in "abcde":
        await peer.call("session.create", session_id=name, items=[user(name)])
        ids.append(await peer.ask("session.compact", session_id=name))
    await gate.reached(5)
    health = await peer.call("server.health")
    assert health["queues"]["running_compactions"] == 5
    gate.open()
    for id in ids:
        assert (await peer.result(id))["status"] == "completed"


async def test_one_who_expects_the_generation_before_is_refused_after_it(
    peer: Peer, gate: Gate
) -> None:
    """PROTOCOL.md §2: a compaction is a conflict for whoever did not know of it."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    compact = await peer.ask("session.compact", session_id="a", expected_generation=0)
    await gate.reached()
    await peer.call("session.append", session_id="a", items=[user("y")], expected_generation=0)
    gate.open()
    await peer.result(compact)
    with pytest.raises(Conflict):
        await peer.call("session.append", session_id="a", items=[user("z")], expected_generation=0)


# Failing.


async def test_a_summariser_that_fails_leaves_everything_as_it_was(
    peer: Peer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL.md §5.6; BUGLOG B04: the next attempt works and leaves one archive."""
    await peer.call("session.create", session_id="a", items=[SYSTEM, user("x")])
    before = await look(peer)
    gate.fails_with = CompactionFailed(stage="summarise", provider_status=503, retryable=True)
    gate.open()
    with pytest.raises(CompactionFailed) as caught:
        await peer.call("session.compact", session_id="a", operation_id="op")
    assert caught.value.data == {"stage": "summarise", "provider_status": 503}
    assert caught.value.retryable is True
    assert await look(peer) == before
    operation = (await peer.call("operation.get", operation_id="op"))["operation"]
    assert operation["status"] == "failed"
    assert operation["error"] == caught.value.to_wire()
    gate.fails_with = None
    result = await peer.call("session.compact", session_id="a")
    assert result["session"]["archived_revisions"] == [1]
    assert await ends(peer) == [("failed", "compaction_failed"), ("completed", None)]


async def test_an_archive_that_cannot_be_written_leaves_everything_as_it_was(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, incidents: list[str]
) -> None:
    """DESIGN.md promise 3 and 13: no replacement without its archive."""
    archive = SqliteStore.archive
    failing = True

    async def fails(self: SqliteStore, session: Session, kind: Kind, operation_id: str) -> Revision:
        if failing:
            raise OSError(28, "No space left on device")
        return await archive(self, session, kind, operation_id)

    monkeypatch.setattr(SqliteStore, "archive", fails)
    incidents.append("OSError")
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        before = await look(peer)
        answer = await peer.answer(await peer.ask("session.compact", session_id="a"))
        assert answer["error"]["code"] == -32603
        assert await look(peer) == before
        assert [status for status, _ in await ends(peer)] == ["failed"]
        failing = False
        assert (await peer.call("session.compact", session_id="a"))["reminder_entry_id"] == 2
        assert len(list((folder / "data" / "archives").rglob("*.*"))) == 1


async def test_a_session_deleted_meanwhile_takes_its_compaction_with_it(
    peer: Peer, gate: Gate
) -> None:
    """PROTOCOL.md §3, §4: exactly one `finished`; what is made anew is left alone."""
    for again in (False, True):
        await peer.call("session.create", session_id="a", items=[user("x")])
        await peer.call("session.subscribe", session_id="a")
        compact = await peer.ask("session.compact", session_id="a", operation_id=f"op{again}")
        await gate.reached(1 + again)
        for _ in range(10):  # by now it is told what happens, and reads the log no more
            await peer.call("session.list")
        assert (await peer.call("session.delete", session_id="a"))["deleted"] is True
        if again:
            await peer.call("session.create", session_id="a", items=[user("new")])
        gate.open()
        with pytest.raises((CompactionError, NotFound)):
            await peer.result(compact)
        gate.close()
        operation = await peer.call("operation.get", operation_id=f"op{again}")
        assert operation["operation"]["status"] == "cancelled"
        finished = await peer.notice("compaction.finished")
        assert finished["params"]["status"] == "cancelled"
        assert finished["params"]["reason"] == "session_deleted"
        if again:
            assert await peer.items("a") == [user("new")]
            assert (await peer.call("session.get", session_id="a"))["session"]["busy"] is False


async def test_a_compaction_that_ends_late_leaves_the_archive_of_the_next_alone(
    peer: Peer, gate: Gate
) -> None:
    """DESIGN.md promise 3: the session was made anew meanwhile, and is at the same revision."""
    await peer.call("session.create", session_id="a", items=[user("old")])
    one = await peer.ask("session.compact", session_id="a", operation_id="one")
    await gate.reached()
    await peer.call("session.delete", session_id="a")
    await peer.call("session.create", session_id="a", items=[user("new")])
    two = await peer.ask("session.compact", session_id="a", operation_id="two")
    await gate.reached(2)
    for _ in range(20):  # by now its archive is written, if that is not left for later
        await peer.call("session.list")
    await peer.call("operation.cancel", operation_id="one")
    with pytest.raises(Cancelled):
        await peer.result(one)
    gate.open()
    assert (await peer.result(two))["archived_revision"] == 1
    assert await peer.items("a", revision=1) == [user("new")]


async def test_a_replacement_that_cannot_be_stored_leaves_everything_as_it_was(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN.md promise 13: no archive that nobody names is left behind."""
    replace = Ledger.replace
    failing = True

    def fails(self: Ledger, *arguments: Any) -> Any:
        if failing:
            raise OSError(errno.ENOSPC, "no space")
        return replace(self, *arguments)

    monkeypatch.setattr(Ledger, "replace", fails)
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        before = await look(peer)
        with pytest.raises(StorageFull):
            await peer.call("session.compact", session_id="a")
        assert await look(peer) == before
        assert archives_in(folder) == 0
        assert await ends(peer) == [("failed", "storage_full")]
        failing = False
        await peer.call("session.compact", session_id="a")
        assert archives_in(folder) == 1


def archives_in(folder: Path) -> int:
    return len([path for path in (folder / "data" / "archives").rglob("*") if path.is_file()])


async def test_an_end_that_could_not_be_stored_is_stored_before_the_next_begins(
    start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL.md §4: exactly one `finished` for each `started`, also when the disk fails."""
    end = Ledger.end
    failing = True

    def fails(self: Ledger, *arguments: Any) -> Any:
        if failing:
            raise OSError(errno.ENOSPC, "no space")
        return end(self, *arguments)

    monkeypatch.setattr(Ledger, "end", fails)
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        one = await peer.ask("session.compact", session_id="a", operation_id="one")
        await gate.reached()
        await peer.call("operation.cancel", operation_id="one")
        with pytest.raises(Cancelled):
            await peer.result(one)
        failing = False
        gate.open()
        await peer.call("session.compact", session_id="a", operation_id="two")
        assert await ends(peer) == [("cancelled", "cancelled"), ("completed", None)]
        operation = (await peer.call("operation.get", operation_id="one"))["operation"]
        assert operation["status"] == "cancelled"


async def test_a_history_that_another_replaced_is_left_alone(
    start: Start, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL.md §5: `superseded`, nothing written, where the generation is another by then."""
    session = SqliteStore.session
    one_more = 0

    async def replaced(self: SqliteStore, session_id: str) -> Session:
        found = await session(self, session_id)
        return structs.replace(found, generation=found.generation + one_more)

    monkeypatch.setattr(SqliteStore, "session", replaced)
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        before = await look(peer)
        compact = await peer.ask("session.compact", session_id="a")
        await gate.reached()
        one_more = 1
        gate.open()
        with pytest.raises(Superseded) as caught:
            await peer.result(compact)
        one_more = 0
        assert (caught.value.code, caught.value.retryable) == (1008, True)
        assert await look(peer) == before
        assert await ends(peer) == [("failed", "superseded")]
        assert (await peer.call("session.compact", session_id="a"))["reminder_entry_id"] == 2


# Cancelling.


async def test_a_compaction_can_be_cancelled_by_its_operation(
    daemon: Daemon, peer: Peer, gate: Gate
) -> None:
    """PROTOCOL.md §3, `operation.cancel`: from any connection; never behind what it cancels."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    before = await look(peer)
    for number, waits in enumerate((True, False)):
        compact = await peer.ask(
            "session.compact", session_id="a", operation_id=f"op-{number}", wait=waits
        )
        await gate.reached(number + 1)
        async with daemon.connect() as other:
            canceller = other if waits else peer
            cancelled = await canceller.call("operation.cancel", operation_id=f"op-{number}")
        assert cancelled["cancelled"] is True
        assert cancelled["operation"]["status"] == "cancelled"
        if waits:
            with pytest.raises(Cancelled) as caught:
                await peer.result(compact)
            assert caught.value.code == 1008
        assert gate.left == number + 1
        assert await look(peer) == before
        again = await peer.call("operation.cancel", operation_id=f"op-{number}")
        assert again["cancelled"] is False or again == cancelled
    assert await ends(peer) == [("cancelled", "cancelled")] * 2
    gate.open()
    result = await peer.call("session.compact", session_id="a")
    assert result["reminder_entry_id"] == 2


async def test_cancelling_what_has_ended_says_so(peer: Peer) -> None:
    """PROTOCOL.md §3: after the commit `already_committed`; an unknown one is not found."""
    await peer.call("session.create", session_id="a", items=[user("x")], operation_id="made")
    await peer.call("session.compact", session_id="a", operation_id="done")
    for operation_id in ("made", "done"):
        with pytest.raises(AlreadyCommitted) as caught:
            await peer.call("operation.cancel", operation_id=operation_id)
        assert caught.value.code == 1008
    with pytest.raises(NothingToCompact):
        await peer.call("session.compact", session_id="a", operation_id="skipped")
    skipped = await peer.call("operation.cancel", operation_id="skipped")
    assert (skipped["cancelled"], skipped["operation"]["status"]) == (False, "skipped")
    for method in ("operation.cancel", "operation.get"):
        with pytest.raises(NotFound) as not_found:
            await peer.call(method, operation_id="nothing")
        assert not_found.value.data == {"what": "operation"}
    assert (await peer.call("session.get", session_id="a"))["session"]["generation"] == 1


async def test_a_cancelled_request_ends_its_compaction_and_has_one_answer(
    peer: Peer, gate: Gate
) -> None:
    """PROTOCOL.md §3, `$/cancelRequest`; BUGLOG B57: one outcome for each id, the rest goes on."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    before = await look(peer)
    compact = await peer.ask("session.compact", session_id="a", operation_id="op")
    await gate.reached()
    await peer.say(
        notification("$/cancelRequest", id=compact),
        notification("$/cancelRequest", id=compact),
        notification("$/cancelRequest", id=1),
        notification("$/cancelRequest", id="never used"),
        *(request(f"ping {number}", "protocol.ping") for number in range(10)),
    )
    answer = await peer.answer(compact)
    assert answer["error"]["code"] == -32800
    assert answer["error"]["data"]["reason"] == "request_cancelled"
    for number in range(10):
        await peer.result(f"ping {number}")
    operation = await peer.call("operation.get", operation_id="op", wait_ms=10_000)
    assert operation["operation"]["status"] == "cancelled"
    assert await ends(peer) == [("cancelled", "cancelled")]
    assert await look(peer) == before
    await peer.say(notification("$/cancelRequest", id=compact))
    assert await peer.rest() == []


async def test_a_waiting_client_that_leaves_cancels_its_compaction(
    daemon: Daemon, peer: Peer, gate: Gate
) -> None:
    """PROTOCOL.md §5.6: cancellation propagates. One that does not wait leaves it running."""
    for name, waits in (("a", True), ("b", False)):
        await peer.call("session.create", session_id=name, items=[user("x")])
        async with daemon.connect() as other:
            params: Message = {"session_id": name, "operation_id": name, "wait": waits}
            id = await other.ask("session.compact", **params)
            await gate.reached(1 if waits else 2)
            if not waits:
                await other.result(id)
    left = await peer.call("operation.get", operation_id="a", wait_ms=10_000)
    assert left["operation"]["status"] == "cancelled"
    gate.open()
    stays = await peer.call("operation.get", operation_id="b", wait_ms=10_000)
    assert stays["operation"]["status"] == "completed"
    assert await ends(peer, "a") == [("cancelled", "cancelled")]
    assert (await peer.call("session.get", session_id="a"))["session"]["busy"] is False


@pytest.mark.promise("D9")
async def test_a_compaction_cancelled_during_its_commit_stands(
    start: Start, hold_commits: HoldCommits
) -> None:
    """DESIGN.md §1: from the commit on a cancel comes too late, and says so."""
    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await peer.call("session.create", session_id="a", items=[user("x")])
        held = hold_commits()
        compact = await peer.ask("session.compact", session_id="a", operation_id="op")
        try:
            with anyio.fail_after(WAIT_S):
                await held.reached.wait()
            cancel = await other.ask("operation.cancel", operation_id="op")
            late = await other.ask("session.append", session_id="a", items=[user("late")])
            await other.call("protocol.ping")
            await peer.say(notification("$/cancelRequest", id=compact))
            await peer.call("protocol.ping")
        finally:
            held.go.set()
        answer = await peer.answer(compact)
        if "error" in answer:
            assert answer["error"]["data"]["reason"] == "request_cancelled"
        with pytest.raises(AlreadyCommitted):
            await other.result(cancel)
        await other.result(late)
        operation = await peer.call("operation.get", operation_id="op")
        assert operation["operation"]["status"] == "completed"
        assert [entry["id"] for entry in await peer.entries("a")] == [2, 3]
        assert await ends(peer) == [("completed", None)]


@pytest.mark.promise("D9")
async def test_cancels_at_every_moment_leave_one_outcome_each(peer: Peer) -> None:
    """DESIGN.md promise 2; BUGLOG B57, B82: wholly before or wholly after, one `finished`."""
    await peer.call("session.create", session_id="a", items=[SYSTEM, user("x")])
    for turn in range(60):
        before = await peer.call("session.get", session_id="a")
        operation_id = f"op-{turn}"
        params: Message = {"session_id": "a", "operation_id": operation_id, "force": True}
        compact = await peer.ask("session.compact", **params)
        for _ in range(turn % 20):
            await peer.call("protocol.ping")
        if turn % 3:
            await peer.say(notification("$/cancelRequest", id=compact))
        else:
            await peer.answer(await peer.ask("operation.cancel", operation_id=operation_id))
        answer = await peer.answer(compact)
        if "error" in answer:
            assert answer["error"]["data"]["reason"] in ("request_cancelled", "cancelled")
        after = await peer.call("session.get", session_id="a")
        try:
            operation = await peer.call("operation.get", operation_id=operation_id, wait_ms=9000)
        except NotFound:
            assert after["session"] == before["session"]
            continue
        after = await peer.call("session.get", session_id="a")
        done = operation["operation"]["status"] == "completed"
        assert after["session"]["generation"] == before["session"]["generation"] + done
        if not done:
            assert after["entries"] == before["entries"]
        else:
            archived = await peer.entries("a", revision=before["session"]["revision"])
            assert archived == before["entries"]
    statuses = {status for status, _ in await ends(peer)}
    assert statuses <= {"completed", "cancelled"}
