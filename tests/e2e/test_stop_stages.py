"""A signal at each stage of the life of a real daemon (DESIGN.md promise 14; PROMISES.md L, R8).

The daemon is held at a stage by its own launcher, which puts a function in front of one of the
product's: it says that it was reached, and goes on when it is told to.
"""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Final

import anyio
import anyio.abc
import msgspec
import pytest
from tests.e2e.conftest import STOP_S, WAIT_S, Spawn

from recapd.daemon.cli import ExitCode
from recapd.protocol import messages as m
from recapd.protocol.client import Client, ConnectionLost, NotConnected, connect

STORES: Final = Path(__file__).parent.parent / "data" / "stores"

LAUNCHER: Final = """
import os, sys
import {module} as module
real = {place}
def held(*arguments, **named):
    os.write({told}, b"!")
    os.read({go}, 1)
    return real(*arguments, **named)
{place} = held
from recapd.daemon.cli import main
sys.argv = ["recapd", "serve", "--data-dir", {data!r}, "--socket", {socket!r}, *{more!r}]
main()
"""

STAGES: Final = {
    "before the lock": ("recapd.storage.sqlite", "module.hold"),
    "in the migration": ("recapd.storage.sqlite", "module.migrate"),
    "before the sweep": ("recapd.storage.sqlite", "module.archives.sweep"),
    "before the socket": ("recapd.daemon.lifecycle", "module.bound_socket"),
    "before it is ready": ("recapd.daemon.commands.serve", "module._say_ready"),
}


class Held:
    """A daemon that stops at a stage until `release` is called."""

    def __init__(self, folder: Path, module: str, place: str, *more: str) -> None:
        self.socket = folder / "rpc.sock"
        self._told, told = os.pipe()
        go, self._go = os.pipe()
        program = LAUNCHER.format(
            **{"module": module, "place": place, "told": told, "go": go, "more": more},
            data=str(folder / "data"),
            socket=str(self.socket),
        )
        self.log = folder / "held.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[told, go],
                env={**os.environ, "RECAPD_HOME": str(folder / "home")},
            )
        os.close(told)
        os.close(go)
        self._ended = os.pidfd_open(self.process.pid)

    async def reached(self) -> None:
        with anyio.fail_after(WAIT_S):
            await anyio.wait_readable(self._told)
        assert os.read(self._told, 1) == b"!", self.log.read_text()

    def release(self) -> None:
        os.write(self._go, b"!" * 1000)

    async def exit_code(self) -> int:
        with anyio.fail_after(STOP_S):
            await anyio.wait_readable(self._ended)
        return self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for descriptor in (self._told, self._go, self._ended):
            os.close(descriptor)


@asynccontextmanager
async def held(folder: Path, module: str, place: str, *more: str) -> AsyncGenerator[Held]:
    daemon = Held(folder, module, place, *more)
    try:
        await daemon.reached()
        yield daemon
    finally:
        daemon.close()


def older_store(folder: Path) -> None:
    shutil.copytree(STORES / "schema-1", folder / "data")
    for path in (folder / "data", *(folder / "data").rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)


def left(folder: Path) -> set[str]:
    return {path.name for path in (folder / "data").iterdir()} - {"expected.json"}


@pytest.mark.promise("R8")
@pytest.mark.parametrize(
    ("stage", "signals"),
    [
        *((stage, [signal.SIGTERM]) for stage in STAGES),
        *(("in the migration", signals) for signals in ([signal.SIGINT], [signal.SIGTERM] * 2)),
        *(("before it is ready", signals) for signals in ([signal.SIGINT], [signal.SIGTERM] * 2)),
    ],
)
async def test_a_signal_while_it_starts(
    spawn: Spawn, folder: Path, stage: str, signals: list[signal.Signals]
) -> None:
    """It ends well as soon as the stage has; the next one starts, with all that was there."""
    older_store(folder)
    async with held(folder, *STAGES[stage]) as daemon:
        for number in signals:
            daemon.process.send_signal(number)
        daemon.release()
        assert await daemon.exit_code() == ExitCode.DONE, daemon.log.read_text()
        assert daemon.log.read_text().count("Traceback") == 0
        assert not daemon.socket.exists()
        assert left(folder) == {"archives", "lock", "store.db"}
    process = spawn()
    assert await process.ready(), process.said()
    async with process.connect() as client:
        listed = await client.request("session.list")
        assert {session.session_id for session in listed.sessions} == {"talk", "left"}
        assert (await client.request("session.verify", m.VerifyParams())).faults_total == 0


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_signal_while_it_commits(spawn: Spawn, folder: Path, signals: int) -> None:
    """What was acknowledged is there; what was not may be, once."""
    place = ("recapd.storage.ledger", "module.Ledger.run")
    daemon = Held(folder, *place)
    try:
        daemon.release()  # for the changes of the start, where there are any
        with anyio.fail_after(WAIT_S):
            async with connect(daemon.socket, wait_s=WAIT_S, reconnect=False) as client:
                acknowledged = False
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_stop_when_reached, daemon, signals)
                    with suppress(ConnectionLost, NotConnected):
                        params = m.CreateParams(session_id="a", items=[])
                        await client.request("session.create", params)
                        acknowledged = True
        assert await daemon.exit_code() == ExitCode.DONE, daemon.log.read_text()
        assert left(folder) == {"archives", "lock", "store.db"}
    finally:
        daemon.close()
    process = spawn()
    assert await process.ready(), process.said()
    async with process.connect() as client:
        listed = (await client.request("session.list")).sessions
    assert len(listed) == 1 or not acknowledged


async def _stop_when_reached(daemon: Held, signals: int) -> None:
    await daemon.reached()
    for _ in range(signals):
        daemon.process.send_signal(signal.SIGTERM)


def settings_file(folder: Path, table: str) -> None:
    (folder / "home").mkdir(mode=0o700)
    (folder / "home" / "recapd.toml").write_text(f'[summarizers.chat]\nmodel = "m"\n{table}\n')


async def begin_compaction(client: Client) -> None:
    items = [msgspec.Raw(b'{"role":"user","content":"%b"}' % (b"word " * 200))] * 5
    await client.request("session.create", m.CreateParams(session_id="a", items=items))
    params = m.CompactParams(
        session_id="a", summarizer="chat", operation_id="op", wait=False, force=True
    )
    await client.request("session.compact", params)


@pytest.mark.parametrize("signals", [1, 2])
async def test_a_command_for_a_key_does_not_outlive_the_daemon(
    spawn: Spawn, folder: Path, signals: int
) -> None:
    """It hangs, as one does that asks a person for a password."""
    os.mkfifo(folder / "pid")
    command = f"sleep 1000 & echo $! >{folder}/pid; wait"  # the shell's child, not the daemon's
    settings_file(
        folder,
        f'base_url = "http://127.0.0.1:9/v1"\nkey_command = ["sh", "-c", "{command}"]',
    )
    process = spawn("--drain-timeout-s", "1")
    assert await process.ready(), process.said()
    async with process.connect() as client:
        await begin_compaction(client)
        with anyio.fail_after(WAIT_S):
            child = int(await anyio.Path(folder / "pid").read_text())
        ended = os.pidfd_open(child)
        for _ in range(signals):
            process.signal(signal.SIGTERM)
        assert await process.exit_code(STOP_S) == ExitCode.DONE, process.said()
    with anyio.fail_after(WAIT_S):
        await anyio.wait_readable(ended)
    os.close(ended)
    again = spawn()
    assert await again.ready(), again.said()
    async with again.connect() as client:
        asked = m.OperationGetParams(operation_id="op")
        operation = (await client.request("operation.get", asked)).operation
        assert operation.status in ("cancelled", "failed")


async def test_clients_that_are_stuck_do_not_hold_up_the_end(spawn: Spawn, folder: Path) -> None:
    """Half a frame, a request that waits for an event, a batch of which one waits, and silence."""
    process = spawn("--drain-timeout-s", "1")
    assert await process.ready(), process.said()
    async with process.connect() as client:
        await client.request("session.create", m.CreateParams(session_id="a"))
    wait = (
        b'{"jsonrpc":"2.0","id":1,"method":"session.events","params":'
        b'{"session_id":"a","since":1,"wait_ms":600000}}'
    )
    said = [b'{"jsonrpc":"2.0","id":1,"me', wait + b"\n", b"[%b]\n" % wait, b"\n"]
    async with anyio.create_task_group() as tasks:
        for data in said:
            stream = await anyio.connect_unix(process.socket)
            await stream.send(data)
            tasks.start_soon(_drain, stream)
        process.signal(signal.SIGTERM)
        assert await process.exit_code(STOP_S) == ExitCode.DONE, process.said()
    assert left(folder) == {"archives", "lock", "store.db"}


async def _drain(stream: anyio.abc.SocketStream) -> None:
    """Keep it open until the daemon closes it."""
    async with stream:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                await stream.receive()


@pytest.mark.promise("R8")
async def test_a_newer_store_is_refused_with_a_clear_word_and_left_as_it_is(
    spawn: Spawn, folder: Path
) -> None:
    """Downgrading never damages."""
    older_store(folder)
    first = spawn()
    assert await first.ready()
    first.signal(signal.SIGTERM)
    assert await first.exit_code(STOP_S) == ExitCode.DONE
    with closing(sqlite3.connect(folder / "data" / "store.db")) as database:
        database.execute("PRAGMA user_version = 1000")
    before = {path: path.read_bytes() for path in (folder / "data").rglob("*") if path.is_file()}
    refused = spawn()
    assert await refused.exit_code() == ExitCode.CANNOT_SERVE
    assert refused.said() == "recapd: the store was made by a newer recapd\n"
    after = {path: path.read_bytes() for path in (folder / "data").rglob("*") if path.is_file()}
    assert after == before
