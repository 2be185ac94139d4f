"""The server itself: who it is, how it is, how it stops (PROTOCOL.md §3; DESIGN.md promise 14)."""

import os
import re
import signal
import socket
import sqlite3
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from msgspec import structs
from tests.daemon.conftest import WAIT_S, Daemon, Gate, Message, Peer, request, user

from recapd.daemon.config import Settings
from recapd.daemon.lifecycle import ExitCode, serve
from recapd.protocol.errors import (
    InvalidRequest,
    ShuttingDown,
    Unauthenticated,
    UnsupportedProtocol,
)
from recapd.protocol.methods import METHODS, NOTIFICATIONS, SCOPES
from recapd.storage.sqlite import SqliteStore
from recapd.storage.store import StoreHealth

Start = Callable[..., AbstractAsyncContextManager[Daemon]]


# protocol.*


async def test_a_client_may_introduce_itself(daemon: Daemon) -> None:
    """PROTOCOL.md §3, `protocol.initialize`: first or not at all."""
    introductions: list[Message] = [
        {},
        {"protocol": 1},
        {"client": {"name": "me"}},
        {"protocol": 1, "client": {"name": "me", "version": "2", "extra": {}}, "token": None},
    ]
    for params in introductions:
        async with daemon.connect() as peer:
            result = await peer.call("protocol.initialize", **params)
            assert result["protocol"] == 1
            assert set(result["server"]) == {"name", "version", "instance_id", "store_id", "pid"}
            assert (result["server"]["name"], result["server"]["pid"]) == ("recapd", os.getpid())
            assert result["principal"] == {"uid": os.getuid(), "scopes": sorted(SCOPES)}
            assert re.fullmatch("[0-9a-f]{64}", result["schema_sha256"])
            with pytest.raises(InvalidRequest) as caught:
                await peer.call("protocol.initialize", **params)
            assert caught.value.hint
            await peer.call("protocol.ping")


@pytest.mark.parametrize("first", ["protocol.ping", "session.list", "session.subscribe"])
async def test_an_introduction_comes_first_or_not_at_all(peer: Peer, first: str) -> None:
    """PROTOCOL.md §3: also where what came first is still under way."""
    await peer.say(request("first", first), request("late", "protocol.initialize"))
    with pytest.raises(InvalidRequest):
        await peer.result("late")
    await peer.result("first")


async def test_another_protocol_or_a_token_is_refused(daemon: Daemon) -> None:
    """PROTOCOL.md §6: `unsupported_protocol`, `unauthenticated`."""
    for protocol in (0, 2, -1, 10**20):
        async with daemon.connect() as peer:
            with pytest.raises(UnsupportedProtocol) as caught:
                await peer.call("protocol.initialize", protocol=protocol)
            assert (caught.value.code, caught.value.data) == (-32005, {"supported": [1]})
    async with daemon.connect() as peer:
        with pytest.raises(Unauthenticated) as refused:
            await peer.call("protocol.initialize", token="secret-token")
        assert refused.value.code == -32004
        assert "secret" not in str(refused.value.to_wire())


async def test_the_store_is_the_same_after_a_restart_and_the_instance_is_not(
    start: Start,
) -> None:
    """PROTOCOL.md §3: `store_id` for ever, `instance_id` of this process."""
    servers: list[Message] = []
    for _ in range(2):
        async with start() as daemon, daemon.connect() as peer:
            servers.append((await peer.call("server.info"))["server"])
    assert servers[0]["store_id"] == servers[1]["store_id"]
    assert servers[0]["instance_id"] != servers[1]["instance_id"]


async def test_a_ping_tells_the_time_and_waits_for_nothing(peer: Peer, gate: Gate) -> None:
    """PROTOCOL.md §3: never behind a session."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    compact = await peer.ask("session.compact", session_id="a")
    await gate.reached()
    now = (await peer.call("protocol.ping"))["now"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", now)
    gate.open()
    await peer.result(compact)


async def test_the_protocol_describes_itself(daemon: Daemon, peer: Peer) -> None:
    """PROTOCOL.md §3, `rpc.discover`: every method, the same for everybody."""
    document = await peer.call("rpc.discover")
    assert document["openrpc"].startswith("1.")
    assert [method["name"] for method in document["methods"]] == list(METHODS)
    async with daemon.connect() as other:
        assert await other.call("rpc.discover") == document
    assert all(notification.name in str(document) for notification in NOTIFICATIONS)


# server.info, server.health


async def test_info_counts_what_is_open(daemon: Daemon, peer: Peer) -> None:
    info = await peer.call("server.info")
    assert info == {
        "protocol": 1,
        "server": info["server"],
        "limits": info["limits"],
        "started_at": info["started_at"],
        "connections": 1,
        "sessions_loaded": 0,
    }
    async with daemon.connect() as other:
        await other.call("protocol.ping")
        assert (await peer.call("server.info"))["connections"] == 2
    await peer.until(lambda now: now["connections"] == 1, "server.info")


async def test_health_tells_how_database_disk_and_queues_are(peer: Peer) -> None:
    """PROTOCOL.md §3, `server.health`."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    health = await peer.call("server.health")
    assert health == {
        "ok": True,
        "database": {
            "writable": True,
            "bytes": health["database"]["bytes"],
            "log_bytes": health["database"]["log_bytes"],
        },
        "disk": {"free_bytes": health["disk"]["free_bytes"]},
        "queues": {"waiting_changes": 0, "running_compactions": 0},
        "event_loop": {"longest_stall_ms": health["event_loop"]["longest_stall_ms"]},
        "warnings": [],
    }
    assert health["database"]["bytes"] > 0
    assert health["disk"]["free_bytes"] > 0


async def test_health_warns_with_a_hint_when_the_disk_is_almost_full(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL.md §3: warnings with a hint."""
    monkeypatch.setattr("recapd.storage.sqlite.shutil.disk_usage", _nothing_left)
    health = await peer.call("server.health")
    assert (health["ok"], health["disk"]["free_bytes"]) == (False, 1000)
    (warning,) = health["warnings"]
    assert warning["reason"] == "disk_almost_full"
    assert warning["hint"]


async def test_health_warns_when_the_database_fails(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL.md §3: each warning has a reason and a hint."""
    damaged = StoreHealth(False, True, False, 1, 1 << 30, 1 << 40, 7)
    closed = structs.replace(damaged, damaged=False, log_bytes=0)
    states = [damaged, closed]
    found: list[list[str]] = []

    async def in_turn(_: SqliteStore) -> StoreHealth:
        return states.pop(0)

    monkeypatch.setattr(SqliteStore, "health", in_turn)
    for _ in "12":
        answer = await peer.call("server.health")
        assert answer["ok"] is False
        assert answer["database"]["writable"] is False
        assert answer["queues"]["waiting_changes"] == 7
        assert all(warning["hint"] for warning in answer["warnings"])
        found.append([warning["reason"] for warning in answer["warnings"]])
    assert found == [["database_damaged", "log_large"], ["database_unavailable"]]


class _Usage:
    free = 1000


def _nothing_left(_: Path) -> _Usage:
    return _Usage()


# Stopping.


@pytest.mark.parametrize("params", [{}, {"mode": "drain"}, {"mode": "now"}, {"deadline_ms": 50}])
async def test_shutdown_is_answered_and_ends_the_daemon(start: Start, params: Message) -> None:
    """PROTOCOL.md §3, `server.shutdown`; the socket is gone when it has ended."""
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        assert await peer.call("server.shutdown", **params) == {"stopping": True}
        assert await peer.until_closed() == []
        assert await daemon.exit_code() is ExitCode.STOPPED
        assert not daemon.settings.socket.exists()
        assert sorted(path.name for path in daemon.settings.data_dir.iterdir()) == [
            "archives",
            "lock",
            "store.db",
        ]


async def test_draining_lets_what_is_under_way_end(start: Start, gate: Gate) -> None:
    """PROTOCOL.md §3, `drain`: it is answered; who asks now is told `shutting_down`."""
    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await peer.call("session.create", session_id="a", items=[user("x")])
        await other.call("session.subscribe", session_id="a")
        compact = await peer.ask("session.compact", session_id="a")
        await gate.reached()
        pull = await other.ask("session.events", session_id="a", since=3, wait_ms=600_000)
        await other.call("protocol.ping")
        stopping = await peer.ask("server.shutdown")
        notice = await other.notice("server.draining")
        assert set(notice["params"]) == {"subscription_id", "deadline"}
        assert (await other.result(pull))["events"] == []  # it waited for nothing that may come
        await peer.result(stopping)
        with pytest.raises(ShuttingDown) as caught:
            await peer.call("session.append", session_id="a", items=[user("late")])
        assert (caught.value.code, caught.value.retryable) == (-32003, True)
        async with daemon.connect() as third:
            assert await third.until_closed() == []
        gate.open()
        assert (await peer.result(compact))["status"] == "completed"
        assert await peer.until_closed() == []
    async with start() as daemon, daemon.connect() as peer:
        assert (await peer.call("session.get", session_id="a"))["session"]["generation"] == 1


async def test_draining_waits_for_a_compaction_that_nobody_waits_for(
    start: Start, gate: Gate
) -> None:
    """PROTOCOL.md §3: "after what is under way"."""
    async with start(drain_timeout_s=10) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        await peer.call("session.compact", session_id="a", wait=False, operation_id="op")
        await gate.reached()
        await peer.call("server.shutdown")
        assert await peer.until_closed() == []
        gate.open()
        assert await daemon.exit_code() is ExitCode.STOPPED
    async with start() as daemon, daemon.connect() as peer:
        operation = (await peer.call("operation.get", operation_id="op"))["operation"]
        assert operation["status"] == "completed"


@pytest.mark.parametrize("params", [{"mode": "drain", "deadline_ms": 100}, {"mode": "now"}])
@pytest.mark.parametrize("waits", [True, False])
async def test_what_takes_too_long_is_cancelled_and_the_daemon_ends(
    start: Start, gate: Gate, params: Message, waits: bool
) -> None:
    """DESIGN.md promise 14: in bounded time; the history is as it was, one `finished`."""
    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await peer.call("session.create", session_id="a", items=[user("x")])
        await peer.ask("session.compact", session_id="a", operation_id="op", wait=waits)
        await gate.reached()
        await other.ask("session.events", session_id="a", since=9**9, wait_ms=600_000)
        with anyio.fail_after(5):
            await other.call("server.shutdown", **params)
            await daemon.exit_code()
    async with start() as daemon, daemon.connect() as peer:
        operation = (await peer.call("operation.get", operation_id="op"))["operation"]
        assert operation["status"] in ("cancelled", "failed")
        session = (await peer.call("session.get", session_id="a"))["session"]
        assert (session["generation"], session["busy"]) == (0, False)
        events = (await peer.call("session.events", session_id="a", since=2))["events"]
        assert [event["method"] for event in events] == [
            "compaction.started",
            "compaction.finished",
        ]
        again = await peer.call("session.compact", session_id="a", summary="s")
        assert again["session"]["generation"] == 1


async def test_what_was_acknowledged_before_the_end_is_there_afterwards(start: Start) -> None:
    """DESIGN.md promise 1 and 14, under load."""
    acknowledged: dict[str, list[str]] = {}

    async def append(daemon: Daemon, name: str) -> None:
        acknowledged[name] = []
        async with daemon.connect() as peer:
            await peer.call("session.create", session_id=name)
            try:
                for number in range(1_000_000):
                    text = f"{name} {number}"
                    await peer.call("session.append", session_id=name, items=[user(text)])
                    acknowledged[name].append(text)
            except (ShuttingDown, anyio.EndOfStream, anyio.BrokenResourceError):
                pass

    async with start() as daemon, anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(append, daemon, f"s{number}")
        async with daemon.connect() as peer:
            await peer.until(
                lambda listed: (
                    len(listed["sessions"]) == 8
                    and all(one["entries"] > 5 for one in listed["sessions"])
                ),
                "session.list",
            )
            await peer.call("server.shutdown", mode="now")
        await daemon.exit_code()
    async with start() as daemon, daemon.connect() as peer:
        for name, texts in acknowledged.items():
            found = [item["content"] for item in await peer.items(name, limit=100_000)]
            assert found[: len(texts)] == texts
            assert len(found) <= len(texts) + 1


async def test_a_signal_drains_and_a_second_one_ends_at_once(start: Start, gate: Gate) -> None:
    """DESIGN.md promise 14."""
    for signals in ([signal.SIGTERM], [signal.SIGINT], [signal.SIGTERM, signal.SIGTERM]):
        async with start(drain_timeout_s=1 if len(signals) == 1 else 60) as daemon:
            async with daemon.connect() as peer:
                answer = await peer.call("session.create", items=[user("x")])
                await peer.call("session.subscribe", since="now")
                await peer.ask("session.compact", session_id=answer["session_id"])
                await gate.reached(gate.entered + 1)
                with anyio.fail_after(WAIT_S):
                    signal.raise_signal(signals[0])
                    await peer.notice("server.draining")
                    for more in signals[1:]:
                        signal.raise_signal(more)
                    assert await daemon.exit_code() is ExitCode.STOPPED


async def test_a_daemon_leaves_no_thread_behind(start: Start) -> None:
    """BUGLOG B63: an unclosed connection's thread would keep the process alive."""
    async with start() as daemon, daemon.connect() as peer:
        for name in "abcd":
            await peer.call("session.create", session_id=name, items=[user("x" * 300_000)])
        ids = [await peer.ask("session.compact", session_id=name) for name in "abcd"]
        for id in ids:
            await peer.result(id)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and "AnyIO" not in thread.name:
            await anyio.to_thread.run_sync(thread.join, WAIT_S)  # it may be on its last step
            assert not thread.is_alive(), thread.name


# Starting.


async def test_a_second_daemon_on_the_same_store_or_socket_leaves(
    start: Start, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DESIGN.md promise 10: it says so, and the first one goes on."""
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a")
        first = daemon.settings
        for data_dir, path in (
            (first.data_dir, first.socket),
            (first.data_dir, folder / "other.sock"),
            (folder / "other", first.socket),
        ):
            settings = Settings(data_dir=data_dir, socket=path)
            assert await serve(settings, ready=_never) is ExitCode.ALREADY_SERVED
            said = capsys.readouterr().err
            assert said == "recapd: another daemon serves this store or socket\n"
        await peer.call("session.append", session_id="a", items=[user("x")])
        assert not (folder / "other.sock").exists()


def _never() -> None:
    raise AssertionError("it takes connections")


async def test_a_stale_socket_is_taken_over(start: Start, folder: Path) -> None:
    """PROMISES.md S3; BUGLOG B78."""
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "rpc.sock"))
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("protocol.ping")


def a_file(path: Path) -> None:
    path.write_bytes(b"precious")


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "precious").write_bytes(b"precious")


def a_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def a_link_to_a_file(path: Path) -> None:
    path.with_name("elsewhere").write_bytes(b"precious")
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("put", [a_file, a_folder, a_link, a_link_to_a_file])
async def test_what_is_no_socket_is_refused_and_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], put: Callable[[Path], None]
) -> None:
    """PROMISES.md S3."""
    path = folder / "rpc.sock"
    put(path)
    before = path.lstat()
    settings = Settings(data_dir=folder / "data", socket=path)
    assert await serve(settings, ready=_never) is ExitCode.CANNOT_SERVE
    assert path.lstat() == before
    said = capsys.readouterr().err
    assert said.startswith("recapd: ")
    assert str(folder) not in said


async def test_a_live_socket_of_another_program_is_never_taken_over(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DESIGN.md promise 10: "a live one never", whoever listens."""
    path = folder / "rpc.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        settings = Settings(data_dir=folder / "data", socket=path)
        assert await serve(settings, ready=_never) is ExitCode.ALREADY_SERVED
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


@pytest.mark.parametrize("name", ["data", "data/lock", "data/store.db", "data/archives"])
@pytest.mark.parametrize("dangling", [False, True])
async def test_links_in_the_store_are_not_followed(folder: Path, name: str, dangling: bool) -> None:
    """PROMISES.md S4: in place of the store, its lock, its database or its archives."""
    elsewhere = folder / "elsewhere"
    if not dangling:
        elsewhere.mkdir(mode=0o700)
        if "." in name or name.endswith("lock"):
            elsewhere.rmdir()
            elsewhere.touch(0o600)
    (folder / name).parent.mkdir(mode=0o700, exist_ok=True)
    (folder / name).symlink_to(elsewhere)
    settings = Settings(data_dir=folder / "data", socket=folder / "rpc.sock")
    assert await serve(settings, ready=_never) is ExitCode.CANNOT_SERVE
    assert elsewhere.exists() is not dangling
    assert not dangling or not elsewhere.is_symlink()
    if elsewhere.is_dir():
        assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o702])
async def test_a_folder_that_others_may_write_to_is_refused(folder: Path, mode: int) -> None:
    """PROMISES.md S1."""
    (folder / "data").mkdir()
    (folder / "data").chmod(mode)
    settings = Settings(data_dir=folder / "data", socket=folder / "rpc.sock")
    assert await serve(settings, ready=_never) is ExitCode.CANNOT_SERVE
    assert list((folder / "data").iterdir()) == []


async def test_a_store_of_a_newer_version_is_refused_and_left_as_it_is(
    start: Start, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PROMISES.md R8."""
    async with start():
        pass
    path = folder / "data" / "store.db"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    before = path.read_bytes()
    settings = Settings(data_dir=folder / "data", socket=folder / "rpc.sock")
    assert await serve(settings, ready=_never) is ExitCode.CANNOT_SERVE
    assert path.read_bytes() == before
    assert capsys.readouterr().err == "recapd: the store was made by a newer recapd\n"


@pytest.mark.parametrize("damage", [b"not a database" * 1000, b"\0" * 4096])
async def test_a_damaged_database_is_refused_and_left_as_it_is(
    start: Start, folder: Path, damage: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """PROMISES.md R5."""
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
    path = folder / "data" / "store.db"
    path.write_bytes(damage + path.read_bytes()[len(damage) :])
    before = path.read_bytes()
    settings = Settings(data_dir=folder / "data", socket=folder / "rpc.sock")
    assert await serve(settings, ready=_never) is ExitCode.CANNOT_SERVE
    assert path.read_bytes() == before
    assert "damaged" in capsys.readouterr().err
