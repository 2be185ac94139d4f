"""Stopping: at any moment, in bounded time, nothing acknowledged lost (DESIGN.md promise 14)."""

import random
import signal
from contextlib import suppress
from pathlib import Path

import anyio
import msgspec
import pytest
from tests.e2e.conftest import STOP_S, Process, Serve, Spawn

from recapd.protocol import messages as m
from recapd.protocol.client import Client, ConnectionLost, NotConnected
from recapd.protocol.errors import RpcError, ShuttingDown

CLIENTS = 10


def text_item(text: str) -> msgspec.Raw:
    return msgspec.Raw(b'{"role":"user","content":"%b"}' % text.encode())


class Appender:
    """Appends to a session of its own, item by item, until the daemon goes."""

    def __init__(self, process: Process, name: str) -> None:
        self.name = name
        self.acknowledged: list[int] = []
        self._process = process
        self._going = anyio.Event()

    async def run(self) -> None:
        with suppress(ConnectionLost, NotConnected, ShuttingDown):
            async with self._process.connect() as client:
                with suppress(RpcError):
                    await client.request("session.create", m.CreateParams(session_id=self.name))
                while True:
                    item = text_item(f"{self.name} {len(self.acknowledged)}")
                    result = await client.request(
                        "session.append", m.AppendParams(session_id=self.name, items=[item])
                    )
                    self.acknowledged += result.entry_ids
                    if len(self.acknowledged) == 5:
                        self._going.set()

    async def going(self) -> None:
        await self._going.wait()

    async def check(self, client: Client) -> None:
        """Everything acknowledged is there, once, and at most the one that was under way beside."""
        entries = [entry async for entry in client.pages(self.name)]
        found = [(entry.id, bytes(entry.item)) for entry in entries]
        expected = [
            (entry_id, bytes(text_item(f"{self.name} {number}")))
            for number, entry_id in enumerate(self.acknowledged)
        ]
        assert found[: len(expected)] == expected
        assert len(found) <= len(expected) + 1


async def fill(client: Client, session_id: str, count: int = 2000) -> None:
    await client.request("session.create", m.CreateParams(session_id=session_id))
    items = (bytes(text_item(f"{number} " + "word " * 20)) for number in range(count))
    async for _ in client.append_items(session_id, items):
        pass


async def compact(process: Process, session_id: str) -> None:
    with suppress(ConnectionLost, NotConnected, RpcError):
        async with process.connect() as client:
            await client.request("session.compact", m.CompactParams(session_id=session_id))


async def has_stopped(process: Process, folder: Path) -> None:
    """In time, with code 0, the socket gone, the database put away."""
    assert await process.exit_code(STOP_S) == 0, process.said()
    assert not process.socket.exists()
    names = {path.name for path in (folder / "data").iterdir()}
    assert names == {"archives", "lock", "store.db"}
    assert "Traceback" not in process.said()
    assert " ERROR " not in process.said()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_an_idle_daemon(
    spawn: Spawn, folder: Path, number: signal.Signals
) -> None:
    """BUGLOG B63: SIGTERM, and Ctrl-C in the foreground; with clients that only listen."""
    process = spawn()
    assert await process.ready(), process.said()
    async with process.connect() as client, client.subscribe() as events:
        await client.request("session.create", m.CreateParams(session_id="a"))
        process.signal(number)
        heard: list[str] = []
        with suppress(ConnectionLost, NotConnected):
            heard.extend([notice.method async for notice in events])
        await has_stopped(process, folder)


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_signal_ends_a_daemon_under_load(
    serve: Serve, spawn: Spawn, folder: Path, signals: int
) -> None:
    """BUGLOG B63, B82: while many append, and while a long history is compacted; also twice."""
    process = spawn()
    assert await process.ready(), process.said()
    appenders = [Appender(process, f"s{number}") for number in range(CLIENTS)]
    async with process.connect() as client:
        await fill(client, "long")
        async with anyio.create_task_group() as tasks:
            for appender in appenders:
                tasks.start_soon(appender.run)
            for appender in appenders:
                await appender.going()
            async with client.subscribe("long") as events:
                tasks.start_soon(compact, process, "long")
                async for notice in events:
                    if notice.method == "compaction.started":
                        break
            for _ in range(signals):
                process.signal(signal.SIGTERM)
            await has_stopped(process, folder)
    async with serve() as again, again.connect() as client:
        for appender in appenders:
            await appender.check(client)
        await check_compaction(client, "long", 2000)


async def check_compaction(client: Client, session_id: str, count: int) -> None:
    """It is wholly done or not at all, and its end is told once."""
    read = await client.request("session.get", m.GetParams(session_id=session_id, limit=1))
    session = read.session
    assert not session.busy
    assert session.generation in (0, 1)
    if session.generation == 0:
        assert session.entries == count
        assert session.archived_revisions == ()
    else:
        (revision,) = session.archived_revisions
        archived = [entry async for entry in client.pages(session_id, revision=revision)]
        assert len(archived) == count
    events = await client.request(
        "session.events", m.EventsParams(session_id=session_id, since=0, limit=10_000)
    )
    told = [event for event in map(_decode_event, events.events) if "compaction" in event.method]
    assert [event.method for event in told] == ["compaction.started", "compaction.finished"]
    assert (told[1].status == "completed") is (session.generation == 1)


class _Event(msgspec.Struct):
    method: str
    status: str = ""


def _decode_event(raw: msgspec.Raw) -> _Event:
    return msgspec.json.decode(raw, type=_Event)


async def _moments(spawn: Spawn, folder: Path, count: int, seed: int) -> None:
    """SIGTERM at random moments of a commit under load; every second time once more."""
    random_ = random.Random(seed)
    appenders: list[Appender] = []
    sessions: list[str] = []
    for turn in range(count):
        process = spawn()
        assert await process.ready(), process.said()
        async with process.connect() as client:
            for appender in appenders:
                await appender.check(client)
            for session_id in sessions:
                await check_compaction(client, session_id, 300)
            appenders = [Appender(process, f"t{turn}-{number}") for number in range(CLIENTS)]
            sessions = [f"c{turn}"]
            await fill(client, sessions[0], 300)
            async with anyio.create_task_group() as tasks:
                for appender in appenders:
                    tasks.start_soon(appender.run)
                for appender in appenders:
                    await appender.going()
                async with client.subscribe(sessions[0]) as events:
                    tasks.start_soon(compact, process, sessions[0])
                    async for notice in events:
                        if notice.method == "compaction.started":
                            break
                for _ in range(random_.randrange(40)):
                    await client.request("protocol.ping")
                process.signal(signal.SIGTERM)
                if turn % 2:
                    process.signal(signal.SIGTERM)
                await has_stopped(process, folder)
    process = spawn()
    assert await process.ready(), process.said()
    async with process.connect() as client:
        for appender in appenders:
            await appender.check(client)


async def test_a_signal_at_a_random_moment_of_a_compaction(spawn: Spawn, folder: Path) -> None:
    """BUGLOG B82: the commit is done or not begun; every acknowledged append is on disk."""
    await _moments(spawn, folder, count=4, seed=82)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_signal_at_a_hundred_random_moments(spawn: Spawn, folder: Path) -> None:
    """BUGLOG B82."""
    await _moments(spawn, folder, count=100, seed=100)


async def test_a_signal_during_the_start_is_heard(spawn: Spawn, serve: Serve) -> None:
    """BUGLOG B63: whenever it comes; the next one starts."""
    for number in (signal.SIGTERM, signal.SIGINT):
        process = spawn()
        process.signal(number)
        assert await process.exit_code(STOP_S) in (0, -number, 1, 130)
    async with serve() as again, again.connect() as client:
        await client.request("protocol.ping")


async def test_a_client_that_does_not_read_does_not_hold_up_the_end(
    spawn: Spawn, folder: Path
) -> None:
    """DESIGN.md promise 14: with megabytes that nobody takes."""
    process = spawn()
    assert await process.ready(), process.said()
    async with process.connect() as client:
        await fill(client, "a", 5000)
        async with await anyio.connect_unix(process.socket) as stalled:
            await stalled.send(
                b'{"jsonrpc":"2.0","id":1,"method":"session.get","params":'
                b'{"session_id":"a","limit":100000,"max_bytes":15000000}}\n' * 5
            )
            await stalled.receive(1)
            process.signal(signal.SIGTERM)
            await has_stopped(process, folder)
