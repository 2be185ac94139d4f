"""The client against a real daemon that is killed and started again under it."""

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import msgspec
import pytest

from recapd.protocol.client import Client, Patience, Subscription, connect
from recapd.protocol.messages import AppendParams, CreateParams

WAIT_S: Final = 40

ROUNDS: Final = 5

PATIENCE: Final = Patience(total_s=WAIT_S, pause_s=0.01, pause_max_s=0.1)


class Daemon:
    """A daemon of its own folder, to be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "s"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it takes connections."""
        ready, writing = os.pipe()
        arguments = ["--data-dir", str(self._folder), "--socket", str(self.socket)]
        arguments += ["--ready-fd", str(writing)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "recapd.daemon", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
        )
        os.close(writing)
        with os.fdopen(ready, "rb") as told:
            assert select.select([told], [], [], WAIT_S)[0]
            assert told.read() == b"ready\n"

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait(WAIT_S)

    def restart(self) -> None:
        self.kill()
        self.start()


@asynccontextmanager
async def daemon() -> AsyncGenerator[Daemon]:
    folder = Path(tempfile.mkdtemp(prefix="recapd-"))
    one = Daemon(folder)
    try:
        one.start()
        with anyio.fail_after(WAIT_S):
            yield one
    finally:
        one.kill()
        shutil.rmtree(folder)


class Changes:
    """Lets a task wait for what another brings about."""

    def __init__(self) -> None:
        self._next = anyio.Event()

    def tell(self) -> None:
        self._next.set()
        self._next = anyio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._next.wait()


class Writer:
    """Appends numbered items to a session, one by one. `ids`: of those that were acknowledged."""

    def __init__(self, client: Client, session_id: str) -> None:
        self.ids: list[int] = []
        self.changes = Changes()
        self.enough = False
        self._client = client
        self._session_id = session_id

    async def write(self) -> None:
        while not self.enough:
            item = msgspec.Raw(b'{"n":%d}' % len(self.ids))
            params = AppendParams(session_id=self._session_id, items=[item])
            self.ids += (await self._client.request("session.append", params)).entry_ids
            self.changes.tell()

    async def written(self, count: int) -> None:
        """Returns when so many more were acknowledged."""
        goal = len(self.ids) + count
        await self.changes.until(lambda: len(self.ids) >= goal)


async def test_each_append_is_there_once_however_often_the_daemon_is_killed() -> None:
    async with daemon() as served, connect(served.socket, patience=PATIENCE) as client:
        await client.request("session.create", CreateParams(session_id="s"))
        writer = Writer(client, "s")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.write)
            for _ in range(ROUNDS):
                await anyio.to_thread.run_sync(served.restart)
                await writer.written(20)
            writer.enough = True
        stored = [entry async for entry in client.pages("s")]
        numbers = [b'{"n":%d}' % number for number in range(len(writer.ids))]
        assert [bytes(entry.item) for entry in stored] == numbers
        assert [entry.id for entry in stored] == writer.ids


@pytest.mark.parametrize("session_id", ["a", None], ids=["one session", "all sessions"])
async def test_each_event_is_heard_once_however_often_the_daemon_is_killed(
    session_id: str | None,
) -> None:
    heard: list[tuple[str | None, int | None]] = []
    expected: set[tuple[str | None, int | None]] = set()
    changes = Changes()

    async def listen(events: Subscription) -> None:
        async for notice in events:
            heard.append((notice.session_id, notice.seq))
            changes.tell()

    async with (
        daemon() as served,
        connect(served.socket, patience=PATIENCE) as listener,
        connect(served.socket, patience=PATIENCE) as client,
    ):
        await client.request("session.create", CreateParams(session_id="a"))
        writer = Writer(client, "a")
        async with listener.subscribe(session_id) as events, anyio.create_task_group() as tasks:
            tasks.start_soon(listen, events)
            async with anyio.create_task_group() as writing:
                writing.start_soon(writer.write)
                # Before a session's first event "now" is not exact: see `subscribe`.
                await changes.until(lambda: len(heard) > 0)
                for _ in range(ROUNDS):
                    await anyio.to_thread.run_sync(served.restart)
                    await writer.written(20)
                writer.enough = True
            await anyio.to_thread.run_sync(served.restart)
            # Its first event may come while the listener is away.
            await client.request("session.create", CreateParams(session_id="b"))
            expected |= {("a", seq) for seq in range(2, len(writer.ids) + 2)}
            if session_id is None:
                expected.add(("b", 1))
            await changes.until(lambda: set(heard) >= expected)
            tasks.cancel_scope.cancel()
    assert set(heard) == expected
    assert len(heard) == len(expected)
    assert [seq for name, seq in heard if name == "a"] == list(range(2, len(writer.ids) + 2))
