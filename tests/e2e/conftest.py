"""Real processes: daemons that are started, signalled and killed."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

import anyio
import pytest

from recapd.protocol.client import Client, Patience, connect

WAIT_S: Final = 30
"""For anything that should happen at once; the machine may have other things to do."""

STOP_S: Final = 5
"""DESIGN.md promise 14, "in bounded time"; BUGLOG B63."""


class Process:
    """A daemon of this test, from its start on."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        data_dir: Path | None = None,
        socket: Path | None = None,
        umask: int = -1,
    ) -> None:
        self.data_dir = data_dir or folder / "data"
        self.socket = socket or folder / "rpc.sock"
        self.log = folder / f"{os.urandom(4).hex()}.log"
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("RECAPD_")
        }
        self._ready, writing = os.pipe()
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "recapd.daemon", "serve"),
                        *("--data-dir", str(self.data_dir), "--socket", str(self.socket)),
                        *("--ready-fd", str(writing), *arguments),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[writing],
                    umask=umask,
                    env=environment | {"RECAPD_HOME": str(folder / "home")},
                )
        finally:
            os.close(writing)
        self._ended = os.pidfd_open(self.process.pid)

    async def ready(self) -> bool:
        """Whether it takes connections; False when it has ended instead."""
        with anyio.fail_after(WAIT_S):
            await anyio.wait_readable(self._ready)
        return os.read(self._ready, 10) == b"ready\n"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def exit_code(self, timeout_s: float = WAIT_S) -> int:
        """How it ended, once it has."""
        with anyio.fail_after(timeout_s):
            await anyio.wait_readable(self._ended)
        return self.process.wait()

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.exit_code()

    def said(self) -> str:
        """All that it wrote."""
        return self.log.read_text()

    def connect(self, *, reconnect: bool = False) -> AbstractAsyncContextManager[Client]:
        """A client; without `reconnect` its requests fail when the daemon has gone."""
        return connect(
            self.socket, reconnect=reconnect, patience=Patience(total_s=WAIT_S, pause_s=0.02)
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ready)
        os.close(self._ended)


@pytest.fixture
def folder() -> Generator[Path]:
    """A new folder with a short name, for the path of a socket has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="recapd-"))
    yield path
    shutil.rmtree(path)


Spawn = Callable[..., Process]
Serve = Callable[..., AbstractAsyncContextManager[Process]]


@pytest.fixture
def spawn(folder: Path) -> Generator[Spawn]:
    """Starts a daemon and does not wait; what still runs at the end of the test is killed."""
    processes: list[Process] = []

    def spawn(
        *arguments: str,
        data_dir: Path | None = None,
        socket: Path | None = None,
        umask: int = -1,
    ) -> Process:
        process = Process(folder, *arguments, data_dir=data_dir, socket=socket, umask=umask)
        processes.append(process)
        return process

    yield spawn
    for process in processes:
        process.close()


@pytest.fixture
def serve(spawn: Spawn) -> Serve:
    """Runs a daemon for as long as a block runs, then stops it, which must go well."""

    @asynccontextmanager
    async def serve(*arguments: str) -> AsyncGenerator[Process]:
        process = spawn(*arguments)
        assert await process.ready(), process.said()
        yield process
        if process.process.poll() is None:
            process.signal(signal.SIGTERM)
            assert await process.exit_code() == 0, process.said()
            assert not process.socket.exists()

    return serve
