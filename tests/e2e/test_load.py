"""A long history is compacted while many append (DESIGN.md promises 4 and 8)."""

import os
import resource
import sqlite3
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from tests.e2e.conftest import WAIT_S, Process, Serve

from recapd.protocol import messages as m
from recapd.protocol.client import Client
from recapd.protocol.errors import StorageError


def text_item(text: str) -> bytes:
    return b'{"role":"user","content":"%b"}' % text.encode()


class Writer:
    """Appends numbered items by its own connection until `enough`; `ids` are acknowledged."""

    def __init__(self, session_id: str, name: str) -> None:
        self.session_id = session_id
        self.name = name
        self.ids: list[int] = []

    async def run(self, process: Process, enough: Callable[[], bool]) -> None:
        async with process.connect() as client:
            while not enough():
                item = msgspec.Raw(self.item(len(self.ids)))
                params = m.AppendParams(session_id=self.session_id, items=[item])
                self.ids += (await client.request("session.append", params)).entry_ids

    def item(self, number: int) -> bytes:
        return text_item(f"{self.name} {number}")


class Subscriber:
    """Hears all events of a session."""

    def __init__(self) -> None:
        self.seqs: list[int] = []
        self.replaced: list[dict[str, Any]] = []

    async def run(
        self, process: Process, session_id: str | None, until: str, listening: anyio.Event
    ) -> None:
        """Until `until` is heard of, which is the title of an update that comes last."""
        async with (
            process.connect() as client,
            client.subscribe(session_id, since="now") as events,
        ):
            listening.set()
            async for notice in events:
                params: dict[str, Any] = msgspec.json.decode(notice.params)
                if params["session_id"] == "long" and notice.seq is not None:
                    self.seqs.append(notice.seq)
                    if notice.method == "history.replaced":
                        self.replaced.append(params)
                if notice.method == "session.updated" and params["session_id"] == until:
                    return


async def _compact_under_load(process: Process, items: int, clients: int) -> None:
    first = [text_item(f"{number} " + "word " * 10) for number in range(items)]
    writers = [Writer("long", f"writer {number}") for number in range(clients // 2)]
    writers += [Writer(f"s{number}", f"other {number}") for number in range(clients // 2)]
    subscribers = [Subscriber() for _ in range(4)]
    results: list[m.CompactResult] = []
    ended = False
    async with process.connect() as client, anyio.create_task_group() as tasks:
        for name in ("long", *(f"s{number}" for number in range(clients // 2))):
            await client.request("session.create", m.CreateParams(session_id=name))
        async for _ in client.append_items("long", first):
            pass
        for number, subscriber in enumerate(subscribers):
            listening = anyio.Event()
            session_id = "long" if number % 2 else None
            tasks.start_soon(subscriber.run, process, session_id, "long", listening)
            await listening.wait()
        async with anyio.create_task_group() as writing:
            goals: dict[str, int] = {}

            def enough_of(writer: Writer) -> Callable[[], bool]:
                # Some more after the compaction has ended.
                def enough() -> bool:
                    if not ended:
                        return False
                    goals.setdefault(writer.name, len(writer.ids) + 5)
                    return len(writer.ids) >= goals[writer.name]

                return enough

            for writer in writers:
                writing.start_soon(writer.run, process, enough_of(writer))
            results.append(
                await client.request("session.compact", m.CompactParams(session_id="long"))
            )
            ended = True
        await client.request("session.update", m.UpdateParams(session_id="long", title="end"))
    async with process.connect() as client:
        await _check(client, results[0], first, writers, subscribers)


async def _check(
    client: Client,
    result: m.CompactResult,
    first: list[bytes],
    writers: list[Writer],
    subscribers: list[Subscriber],
) -> None:
    assert isinstance(result.archived_revision, int)
    assert isinstance(result.reminder_entry_id, int)
    archived = [entry async for entry in client.pages("long", revision=result.archived_revision)]
    live = [entry async for entry in client.pages("long")]
    reminder = live[0]
    assert reminder.id == result.reminder_entry_id == archived[-1].id + 1
    carried = [entry for entry in live if entry.id < reminder.id]
    assert live[1 : 1 + len(carried)] == carried == archived[len(archived) - len(carried) :]
    assert len(carried) == result.carried_over
    everything = [*archived, *live[1 + len(carried) :]]
    assert [bytes(entry.item) for entry in archived[: len(first)]] == first
    ids = [entry.id for entry in (*archived, reminder, *live[1 + len(carried) :])]
    assert ids == list(range(1, len(ids) + 1))
    by_id = {entry.id: bytes(entry.item) for entry in everything}
    written = 0
    for writer in writers:
        if writer.session_id != "long":
            entries = [entry async for entry in client.pages(writer.session_id)]
            assert [entry.id for entry in entries] == writer.ids
            continue
        written += len(writer.ids)
        assert writer.ids == sorted(writer.ids)
        for number, entry_id in enumerate(writer.ids):
            assert by_id[entry_id] == writer.item(number)
    assert written == len(everything) - len(first)
    last = subscribers[0].seqs[-1]
    for subscriber in subscribers:
        assert subscriber.seqs == list(range(subscriber.seqs[0], last + 1))
        (replaced,) = subscriber.replaced
        assert replaced["reminder_entry_id"] == reminder.id
        assert replaced["carried_over"] == len(carried)
        assert replaced["retained_entry_ids"] == [entry.id for entry in carried]


async def test_a_compaction_under_load_loses_nothing_and_doubles_nothing(serve: Serve) -> None:
    """DESIGN.md promise 8; 2,000 items and eight clients."""
    async with serve() as process:
        with anyio.fail_after(WAIT_S):
            await _compact_under_load(process, items=2_000, clients=8)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_compaction_of_ten_thousand_items_under_load(serve: Serve) -> None:
    """DESIGN.md promise 8; twenty clients."""
    async with serve() as process:
        await _compact_under_load(process, items=10_000, clients=20)


async def test_many_clients_and_a_reader_from_outside_never_meet_a_lock(
    serve: Serve, folder: Path
) -> None:
    """BUGLOG B60: appends, reads and compactions at once, beside another process's sqlite3."""

    def read_from_outside(path: Path) -> int:
        # What the sqlite3 shell does; it sees a snapshot, and holds up nobody.
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            (count,) = database.execute("SELECT count(*) FROM entries").fetchone()
        database.close()
        return int(count)

    acknowledged = {f"s{number}": 0 for number in range(10)}

    async def work(process: Process, number: int) -> None:
        name = f"s{number % 10}"
        async with process.connect() as client:
            for turn in range(20):
                items = [msgspec.Raw(text_item(f"{number} {turn}"))] * 2
                params = m.AppendParams(session_id=name, items=items)
                appended = await client.request("session.append", params)
                acknowledged[name] += len(appended.entry_ids)
                if turn % 5 == 0:
                    await client.request("session.get", m.GetParams(session_id=name, limit=10))
                if (number, turn) in ((3, 10), (14, 10)):
                    await client.request("session.compact", m.CompactParams(session_id=name))

    async with serve() as process, process.connect() as client:
        for name in acknowledged:
            await client.request("session.create", m.CreateParams(session_id=name))
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as tasks:
                for number in range(50):
                    tasks.start_soon(work, process, number)
                for _ in range(20):
                    path = folder / "data" / "store.db"
                    await anyio.to_thread.run_sync(read_from_outside, path)
        for name, count in acknowledged.items():
            seen = {entry.id async for entry in client.pages(name)}
            info = await client.request("session.get", m.GetParams(session_id=name, limit=1))
            for revision in info.session.archived_revisions:
                seen |= {entry.id async for entry in client.pages(name, revision=revision)}
            reminders = info.session.generation
            assert len(seen) == count + reminders
        assert (await client.request("server.health")).ok


async def test_reading_and_restarting_stores_nothing_again(serve: Serve, folder: Path) -> None:
    """BUGLOG B32: open, read, close a 2 MB session; the database stays as large as it was."""

    def size_bytes() -> int:
        files = [path for path in (folder / "data").rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files)

    sizes: list[int] = []
    for turn in range(4):
        async with serve() as process:
            async with process.connect() as client:
                if turn == 0:
                    items = (text_item(f"{n} " + "x" * 20_000) for n in range(100))
                    await client.request("session.create", m.CreateParams(session_id="a"))
                    async for _ in client.append_items("a", items):
                        pass
            for _ in range(10):
                async with process.connect() as client:
                    assert len([entry async for entry in client.pages("a")]) == 100
        sizes.append(size_bytes())
    assert max(sizes[1:]) - sizes[0] <= 4096


@pytest.mark.promise("F4")
async def test_a_daemon_out_of_descriptors_goes_on_for_those_it_has(serve: Serve) -> None:
    """PROMISES.md F4: what is under way ends, and new clients are served when there is room."""
    async with serve() as process, process.connect() as client:
        await client.request("session.create", m.CreateParams(session_id="a"))
        open_now = len(os.listdir(f"/proc/{process.process.pid}/fd"))
        _, hard = resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE, (open_now + 6, hard))
        async with AsyncExitStack() as stack:
            crowd = [
                await stack.enter_async_context(await anyio.connect_unix(process.socket))
                for _ in range(30)
            ]
            for number in range(20):
                item = msgspec.Raw(text_item(str(number)))
                append = m.AppendParams(session_id="a", items=[item])
                await client.request("session.append", append)
            info = await client.request("session.get", m.GetParams(session_id="a", limit=1))
            assert info.session.entries == 20
            # With no descriptor left there is no archive either: it says so, and nothing is lost.
            try:
                await client.request("session.compact", m.CompactParams(session_id="a"))
            except StorageError:
                pass
            for stream in crowd[:25]:
                await stream.aclose()
            with anyio.fail_after(WAIT_S):
                while True:  # until it has noticed that they have gone
                    try:
                        params = m.CompactParams(session_id="a", force=True)
                        result = await client.request("session.compact", params)
                        break
                    except StorageError:
                        await client.request("protocol.ping")
            assert result.session.generation >= 1
        async with process.connect() as another:
            await another.request("protocol.ping")
        assert " accept: EMFILE" in process.said()
        assert "Traceback" not in process.said()
