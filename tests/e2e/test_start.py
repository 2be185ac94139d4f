"""Starting: one daemon for a store, and nobody else's files or eyes (DESIGN.md promises 10, 11)."""

import hashlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest
from tests.e2e.conftest import STOP_S, Process, Serve, Spawn

from recapd.daemon.cli import ExitCode
from recapd.protocol import messages as m

NOBODY = 65534


def look(folder: Path) -> dict[str, tuple[object, ...]]:
    """Every file below: what it is, when it was changed, and what is in it."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        # The log of a daemon that is refused is not its doing.
        if path.suffix != ".log":
            found[str(path.relative_to(folder))] = (
                *(status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns),
                content,
            )
    return found


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.promise("S1", "S2")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_only_the_owner_can_reach_anything_under_any_umask(
    spawn: Spawn, folder: Path, umask: int
) -> None:
    """PROMISES.md S1, S2; BUGLOG B46, B81: folders 0700, files and socket 0600."""
    process = spawn(umask=umask, socket=folder / "run" / "rpc.sock")
    assert await process.ready(), process.said()
    status = process.socket.lstat()
    assert stat.S_ISSOCK(status.st_mode)
    assert mode_of(process.socket) == 0o600
    # From the first moment: a mode that was set afterwards would show as a later change.
    assert status.st_ctime_ns == status.st_mtime_ns
    async with process.connect() as client:
        session_id = (await client.request("session.create", m.CreateParams())).session_id
        item = msgspec.Raw(b'{"role":"user","content":"x"}')
        await client.request("session.append", m.AppendParams(session_id=session_id, items=[item]))
        await client.request("session.compact", m.CompactParams(session_id=session_id))
    for path in (folder / "data", folder / "run"):
        assert mode_of(path) == 0o700
        for inner in path.rglob("*"):
            assert mode_of(inner) == (0o700 if inner.is_dir() else 0o600), inner.name
    names = {path.name for path in (folder / "data").iterdir()}
    assert names == {"archives", "lock", "store.db", "store.db-wal", "store.db-shm"}


async def test_a_folder_that_was_open_is_tightened(spawn: Spawn, folder: Path) -> None:
    """BUGLOG B81: works when the folder is already there with 0755."""
    for name in ("data", "run"):
        (folder / name).mkdir()
        (folder / name).chmod(0o755)
    process = spawn(socket=folder / "run" / "rpc.sock")
    assert await process.ready(), process.said()
    assert mode_of(folder / "data") == mode_of(folder / "run") == 0o700


@pytest.mark.promise("L1")
async def test_a_second_daemon_leaves_and_has_changed_nothing(
    serve: Serve, spawn: Spawn, folder: Path
) -> None:
    """PROMISES.md L1: within a second (or so, on a busy machine), with its own exit status."""
    async with serve() as first, first.connect() as client:
        await client.request("session.create", m.CreateParams(session_id="a"))
        before = look(folder)
        for data_dir, path in (
            (first.data_dir, first.socket),
            (first.data_dir, folder / "other.sock"),
            (folder / "other", first.socket),
        ):
            second = spawn(data_dir=data_dir, socket=path)
            assert await second.exit_code(STOP_S) == ExitCode.ALREADY_SERVED
            assert not await second.ready()
            assert second.said() == "recapd: another daemon serves this store or socket\n"
            if data_dir == first.data_dir:
                assert look(folder) == before
        await client.request("protocol.ping")


@pytest.mark.promise("L1")
async def test_of_fifty_that_start_at_once_exactly_one_serves(spawn: Spawn, folder: Path) -> None:
    """DESIGN.md promise 10; BUGLOG B61: the schema is made once, the others refuse clearly."""
    processes = [spawn() for _ in range(50)]
    serving: list[Process] = []
    codes: list[int] = []

    async def settle(process: Process) -> None:
        if await process.ready():
            serving.append(process)
        else:
            codes.append(await process.exit_code())

    async with anyio.create_task_group() as tasks:
        for process in processes:
            tasks.start_soon(settle, process)
    assert len(serving) == 1
    assert codes == [ExitCode.ALREADY_SERVED] * 49
    async with serving[0].connect() as client:
        await client.request("session.create", m.CreateParams(session_id="a"))
        health = await client.request("server.health")
        assert health.ok


@pytest.mark.promise("L1")
async def test_after_a_kill_the_next_one_starts_at_once(serve: Serve, spawn: Spawn) -> None:
    """PROMISES.md L1, S3; BUGLOG B78: the socket that was left is taken over."""
    process = spawn()
    assert await process.ready(), process.said()
    async with process.connect() as client:
        await client.request("session.create", m.CreateParams(session_id="a"))
    await process.kill()
    assert process.socket.is_socket()
    async with serve() as again, again.connect() as client:
        listed = await client.request("session.list")
        assert [session.session_id for session in listed.sessions] == ["a"]


async def test_a_socket_path_that_is_too_long_is_one_clear_error(
    spawn: Spawn, folder: Path
) -> None:
    """PROTOCOL.md §1: over 107 bytes, before anything else starts; BUGLOG B80."""
    fits = folder / "é".ljust(106 - len(os.fsencode(folder)) - 1, "x")
    assert len(os.fsencode(fits)) == 107
    process = spawn(socket=fits)
    assert await process.ready(), process.said()
    async with process.connect() as client:
        await client.request("protocol.ping")
    await process.kill()
    for name in (fits.name + "x", "x" * 120):
        process = spawn(data_dir=folder / "new", socket=folder / name)
        assert await process.exit_code() == ExitCode.USAGE
        said = process.said()
        assert said.startswith("recapd: ")
        assert said.count("\n") == 1
        assert "107 bytes" in said
        assert name not in said
        assert not (folder / "new").exists()


def a_file(path: Path) -> None:
    path.write_bytes(b"precious")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.promise("S3")
@pytest.mark.parametrize("put", [a_file, a_folder, a_link])
async def test_what_lies_in_place_of_the_socket_is_refused_and_stays(
    spawn: Spawn, folder: Path, put: Callable[[Path], None]
) -> None:
    """PROMISES.md S3; the real process has its own exit status for it."""
    path = folder / "rpc.sock"
    put(path)
    before = path.lstat()
    process = spawn()
    assert await process.exit_code() == ExitCode.CANNOT_SERVE
    after = path.lstat()  # looking where a link leads is an access, so that time is not compared
    for member in ("st_ino", "st_mode", "st_size", "st_mtime_ns"):
        assert getattr(after, member) == getattr(before, member)
    assert process.said().count("\n") == 1
    assert str(folder) not in process.said()


# Other users.

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="NEEDS ROOT, to be another user as well")

ASK = """
import os, socket, sys
os.setgroups([])
os.setgid({uid})
os.setuid({uid})
with socket.socket(socket.AF_UNIX) as client:
    client.settimeout(10)
    try:
        client.connect({path!r})
        client.sendall(b'{{"jsonrpc":"2.0","id":1,"method":"protocol.ping"}}\\n')
        print(client.recv(100))
    except OSError as error:
        print(type(error).__name__)
"""


async def ask_as(uid: int, path: Path) -> str:
    """What another user gets who asks at the socket."""
    program = ASK.format(uid=uid, path=str(path))
    asked = await anyio.run_process([sys.executable, "-I", "-c", program], stderr=subprocess.STDOUT)
    return asked.stdout.decode().strip()


def open_to_all(path: Path) -> None:
    path.chmod(0o777)


@as_root
@pytest.mark.promise("S2")
async def test_another_user_is_refused(serve: Serve, folder: Path) -> None:
    """PROMISES.md S2: by the folder, by the mode, and by who it is even when both are opened."""
    async with serve() as process, process.connect() as client:
        assert "now" in await ask_as(0, process.socket)
        assert await ask_as(NOBODY, process.socket) == "PermissionError"
        open_to_all(folder)
        assert await ask_as(NOBODY, process.socket) == "PermissionError"
        open_to_all(process.socket)
        answer = await ask_as(NOBODY, process.socket)
        assert answer in ("b''", "ConnectionResetError", "BrokenPipeError")
        await client.request("protocol.ping")
        assert "refused a connection of another user" in process.said()


@as_root
@pytest.mark.promise("S1")
@pytest.mark.parametrize("name", ["data", "data/store.db", "data/archives"])
async def test_a_store_of_another_user_is_refused(
    serve: Serve, spawn: Spawn, folder: Path, name: str
) -> None:
    """PROMISES.md S1."""
    async with serve() as process, process.connect() as client:
        await client.request("session.create", m.CreateParams(session_id="a"))
    os.chown(folder / name, NOBODY, NOBODY)
    before = look(folder / "data")
    refused = spawn()
    assert await refused.exit_code() == ExitCode.CANNOT_SERVE
    assert look(folder / "data") == before


# The log.


async def test_a_log_of_any_level_has_nothing_of_what_was_said(serve: Serve, folder: Path) -> None:
    """BUGLOG B46; logs.py: no message text, no ids of clients' making, no paths; no traceback."""
    secret = "hunter2"
    for form in ("text", "json"):
        async with serve("--log-level", "debug", "--log-format", form) as process:
            async with process.connect() as client:
                session_id = f"{secret}-{form}"
                item = msgspec.Raw(b'{"role":"user","content":"%b"}' % secret.encode())
                await client.request(
                    "session.create", m.CreateParams(session_id=session_id, title=secret)
                )
                await client.request(
                    "session.append", m.AppendParams(session_id=session_id, items=[item])
                )
                await client.request("session.compact", m.CompactParams(session_id=session_id))
                async for _ in client.export(session_id, revision="all"):
                    pass
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(str(process.socket))
                raw.sendall(b'{"' + secret.encode() + b"\n")
                assert raw.recv(10)
        said = process.said()
        assert "ready" in said
        assert secret not in said
        assert str(folder) not in said
        assert "Traceback" not in said
        if form == "json":
            assert all(line.startswith('{"at": "') for line in said.splitlines())
