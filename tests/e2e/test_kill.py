"""Killed at any moment: wholly before or wholly after (DESIGN.md promises 1 to 4, 7, 8)."""

import hashlib
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from tests.e2e.conftest import Process, Serve, Spawn

from recapd.protocol import messages as m
from recapd.protocol.client import Client, ConnectionLost, NotConnected
from recapd.protocol.errors import ArchiveMissing

SYSTEM = b'{"role":"system","content":"be brief"}'


def text_item(text: str) -> bytes:
    return b'{"role":"user","content":"%b"}' % text.encode()


class Round:
    """One session with its history, one that appends to it, and one that compacts it meanwhile."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first = [SYSTEM, *(text_item(f"{name} {n} " + "word " * 50) for n in range(200))]
        self.appended: list[bytes] = []  # acknowledged
        self.compacted: m.CompactResult | None = None  # acknowledged
        self.heard: list[int] = []  # seq of every event that was told
        self.replaced: list[int] = []  # generation of every history.replaced that was told

    async def begin(self, client: Client) -> None:
        await client.request("session.create", m.CreateParams(session_id=self.name))
        async for _ in client.append_items(self.name, self.first):
            pass

    async def append(self, process: Process) -> None:
        with suppress(ConnectionLost, NotConnected):
            async with process.connect() as client:
                while True:
                    item = text_item(f"{self.name} late {len(self.appended)}")
                    params = m.AppendParams(session_id=self.name, items=[msgspec.Raw(item)])
                    await client.request("session.append", params)
                    self.appended.append(item)

    async def compact(self, process: Process) -> None:
        with suppress(ConnectionLost, NotConnected):
            async with process.connect() as client:
                params = m.CompactParams(session_id=self.name, operation_id=self.name)
                self.compacted = await client.request("session.compact", params)

    async def listen(self, process: Process, listening: anyio.Event) -> None:
        with suppress(ConnectionLost, NotConnected):
            async with (
                process.connect() as client,
                client.subscribe(self.name, since="start") as events,
            ):
                listening.set()
                async for notice in events:
                    if notice.seq is not None:
                        self.heard.append(notice.seq)
                    if notice.method == "history.replaced":
                        params: dict[str, Any] = msgspec.json.decode(notice.params)
                        self.replaced.append(params["to_generation"])

    async def check(self, client: Client, folder: Path) -> bool:
        """Whether it was compacted. Nothing is lost, doubled, mixed or left over either way."""
        info = await client.request("session.get", m.GetParams(session_id=self.name, limit=1))
        session = info.session
        assert not session.busy
        live = [entry async for entry in client.pages(self.name)]
        late = [bytes(entry.item) for entry in live]
        if session.generation == 0:
            assert self.compacted is None, "it was acknowledged and is not there"
            assert self.replaced == [], "it was told and is not there"
            assert session.archived_revisions == ()
            assert [entry.id for entry in live] == list(range(1, len(live) + 1))
            everything = late
        else:
            assert session.generation == 1
            (revision,) = session.archived_revisions
            if self.compacted is not None:
                assert self.compacted.archived_revision == revision
            archived = [entry async for entry in client.pages(self.name, revision=revision)]
            reminder = live[1]
            carried = [entry for entry in live[2:] if entry.id < reminder.id]
            after = live[2 + len(carried) :]
            assert late[0] == SYSTEM
            assert reminder.reminder == m.Reminder(1, self.name, revision)
            assert carried == archived[len(archived) - len(carried) :]
            ids = [entry.id for entry in (*archived, reminder, *after)]
            assert ids == list(range(1, len(ids) + 1))
            everything = [bytes(entry.item) for entry in (*archived, *after)]
        assert everything[:201] == self.first
        appended = everything[201:]
        assert appended[: len(self.appended)] == self.appended
        assert len(appended) <= len(self.appended) + 1
        assert session.entries == len(live)
        await self._check_events(client, session.generation)
        await self._check_operation(client, session.generation)
        await self.check_files(client, folder)
        return session.generation == 1

    async def _check_events(self, client: Client, generation: int) -> None:
        params = m.EventsParams(session_id=self.name, since=0, limit=100_000)
        logged = await client.request("session.events", params)
        events: list[dict[str, Any]] = [msgspec.json.decode(event) for event in logged.events]
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        assert self.heard == list(range(1, len(self.heard) + 1))
        assert len(self.heard) <= len(events)
        methods = [event["method"] for event in events]
        assert methods.count("compaction.finished") == methods.count("compaction.started") <= 1
        assert methods.count("history.replaced") == generation
        assert self.replaced == [1][: len(self.replaced)]
        revisions = [event["revision"] for event in events if "history" in event["method"]]
        assert revisions == list(range(1, len(revisions) + 1))

    async def _check_operation(self, client: Client, generation: int) -> None:
        listed = await client.request(
            "session.events", m.EventsParams(session_id=self.name, since=0, limit=100_000)
        )
        if not any(b"compaction.started" in bytes(event) for event in listed.events):
            return
        got = await client.request("operation.get", m.OperationGetParams(operation_id=self.name))
        assert got.operation.status == ("completed" if generation else "failed")
        if generation == 0:
            assert b'"interrupted"' in bytes(got.operation.error or b"")

    async def check_files(self, client: Client, folder: Path) -> None:
        """No file is left over, and each archive is what its revision says."""
        known: set[str] = set()
        sessions = await client.request("session.list", m.ListParams(limit=1000))
        for session in sessions.sessions:
            params = m.SessionParams(session_id=session.session_id)
            revisions = (await client.request("session.revisions", params)).revisions
            known |= {revision.sha256 for revision in revisions}
        files = [path for path in (folder / "data" / "archives").rglob("*") if path.is_file()]
        found = {hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        assert found == known
        assert len(files) == len(known)
        names = {path.name for path in (folder / "data").iterdir()}
        assert names <= {"archives", "lock", "store.db", "store.db-wal", "store.db-shm"}


async def _kill_at_random_moments(spawn: Spawn, folder: Path, count: int, seed: int) -> None:
    random_ = random.Random(seed)
    rounds: list[Round] = []
    compacted: list[bool] = []
    for turn in range(count + 1):
        process = spawn()
        assert await process.ready(), process.said()
        async with process.connect() as client:
            if rounds:
                compacted.append(await rounds[-1].check(client, folder))
            if turn == count:
                for one in rounds:  # what came later has changed nothing of it
                    await one.check(client, folder)
                break
            one = Round(f"round-{turn}")
            rounds.append(one)
            await one.begin(client)
            # The first compaction of a process reads the token table, for longer than all the rest.
            first = m.CreateParams(session_id=f"first-{turn}", items=[msgspec.Raw(text_item("x"))])
            await client.request("session.create", first)
            await client.request("session.compact", m.CompactParams(session_id=f"first-{turn}"))
            async with anyio.create_task_group() as tasks:
                listening = anyio.Event()
                tasks.start_soon(one.append, process)
                tasks.start_soon(one.listen, process, listening)
                await listening.wait()
                tasks.start_soon(one.compact, process)
                for _ in range(random_.randrange(120)):
                    await client.request("protocol.ping")
                await process.kill()
    assert len(compacted) == count
    if count > 20:
        assert len(set(compacted)) == 2, "all moments were on one side of the commit"


@pytest.mark.promise("D1", "D2", "F6")
async def test_a_kill_around_a_compaction_leaves_all_or_nothing(spawn: Spawn, folder: Path) -> None:
    """BUGLOG B11, B29; PROMISES.md D1, D2, F6: kill -9 at five random moments."""
    await _kill_at_random_moments(spawn, folder, count=5, seed=11)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_fifty_kills_around_a_compaction(spawn: Spawn, folder: Path) -> None:
    """BUGLOG B11."""
    await _kill_at_random_moments(spawn, folder, count=50, seed=50)


@pytest.mark.promise("D1", "F6")
async def test_a_compaction_that_was_answered_survives_a_kill(serve: Serve, spawn: Spawn) -> None:
    """BUGLOG B23: at once after the answer; the same revision as in it."""
    process = spawn()
    assert await process.ready(), process.said()
    async with process.connect() as client:
        items = [msgspec.Raw(text_item(str(number))) for number in range(100)]
        await client.request("session.create", m.CreateParams(session_id="a", items=items))
        result = await client.request("session.compact", m.CompactParams(session_id="a"))
        process.process.kill()
        await process.exit_code()
    async with serve() as again, again.connect() as client:
        read = await client.request("session.get", m.GetParams(session_id="a"))
        assert read.session == result.session
        assert isinstance(read.entries, list)
        assert [entry.id for entry in read.entries] == [result.reminder_entry_id]


async def test_an_archive_that_was_removed_is_missed_after_a_restart_only_itself(
    serve: Serve, spawn: Spawn, folder: Path
) -> None:
    """BUGLOG B22: the session reads and compacts on."""
    process = spawn()
    assert await process.ready(), process.said()
    async with process.connect() as client:
        items = [msgspec.Raw(text_item("x"))]
        await client.request("session.create", m.CreateParams(session_id="a", items=items))
        await client.request("session.compact", m.CompactParams(session_id="a"))
    await process.kill()
    for path in (folder / "data" / "archives").rglob("*.zst"):
        path.unlink()
    async with serve() as again, again.connect() as client:
        read = await client.request("session.get", m.GetParams(session_id="a"))
        assert read.session.generation == 1
        for _ in range(2):
            await client.request("session.compact", m.CompactParams(session_id="a", force=True))
        with pytest.raises(ArchiveMissing):
            await client.request("session.get", m.GetParams(session_id="a", revision=1))
        await client.request("session.get", m.GetParams(session_id="a", revision=2))
