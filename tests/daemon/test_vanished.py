"""The folder of the store, or the socket, goes away while it is served (PROMISES.md F; BUGLOG)."""

import shutil
import sqlite3
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tests.daemon.conftest import Daemon, Peer, user

from recapd.protocol.errors import CompactionFailed, StorageError
from recapd.storage.ledger import CommitFailed, Ledger
from recapd.storage.sqlite import open_store
from recapd.storage.store import NewSession


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture, incidents: list[str]) -> Generator[None]:
    """Each failure is logged, and nothing else."""
    yield
    logged = [one.getMessage() for one in caplog.get_records("call") if one.levelno >= 40]
    incidents += logged
    assert all(message.startswith("storage error: ") for message in logged), logged


Start = Callable[..., AbstractAsyncContextManager[Daemon]]


def away(data: Path) -> None:
    """Nothing in its place."""


def an_empty_folder(data: Path) -> None:
    data.mkdir(mode=0o700)


def a_copy(data: Path) -> None:
    shutil.copytree(data.with_name("elsewhere"), data)


def a_file(data: Path) -> None:
    data.write_text("what is this")


def a_link(data: Path) -> None:
    (data.with_name("other")).mkdir(mode=0o700)
    data.symlink_to(data.with_name("other"))


def look(path: Path) -> dict[str, bytes | None]:
    found = [path, *path.rglob("*")] if path.exists() else []
    return {
        str(one): one.read_bytes() if one.is_file() and not one.name.endswith("-shm") else None
        for one in found
    }


def commit_fails(*_: object) -> object:
    raise CommitFailed(sqlite3.OperationalError("disk I/O error"), [None], 1, [])


async def refused(peer: Peer) -> None:
    """No change is made, and each is answered with an error that may pass."""
    with pytest.raises(StorageError):
        await peer.call("session.append", session_id="a", items=[user("lost")])
    with pytest.raises(StorageError):
        await peer.call("session.create", session_id="b")
    with pytest.raises((StorageError, CompactionFailed)):
        await peer.call("session.compact", session_id="a")
    with pytest.raises(StorageError):
        await peer.call("session.rewind", session_id="a", after_entry_id=0)


@pytest.mark.promise("F3")
@pytest.mark.parametrize("put", [away, an_empty_folder, a_copy, a_file, a_link])
async def test_a_store_that_went_away_is_not_made_anew(
    daemon: Daemon, peer: Peer, folder: Path, put: Callable[[Path], None]
) -> None:
    """Nothing is written to what is in its place; when it is back, it is served as before."""
    data = folder / "data"
    await peer.call("session.create", session_id="a", items=[user("x"), user("y")])
    data.rename(folder / "elsewhere")
    put(data)
    before = look(data)
    await refused(peer)
    try:  # what is open can still be read
        assert await peer.items("a") == [user("x"), user("y")]
    except StorageError:
        pass
    health = await peer.call("server.health")
    assert not health["ok"]
    assert "store_moved" in [warning["reason"] for warning in health["warnings"]]
    assert look(data) == before
    if data.is_dir() and not data.is_symlink():
        shutil.rmtree(data)
    elif put is not away:
        data.unlink()
    (folder / "elsewhere").rename(data)
    await peer.call("session.append", session_id="a", items=[user("z")])
    await peer.call("session.compact", session_id="a")
    assert await peer.items("a", revision=2) == [user("x"), user("y"), user("z")]
    assert (await peer.call("server.health"))["ok"]


@pytest.mark.promise("F3")
async def test_a_store_that_is_gone_for_good_ends_well(start: Start, folder: Path) -> None:
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        shutil.rmtree(folder / "data")
        await refused(peer)
        assert not (await peer.call("server.health"))["ok"]
    assert not (folder / "data").exists()


@pytest.mark.promise("F3")
async def test_another_store_is_not_taken_for_this_one_after_a_failure(
    daemon: Daemon,
    peer: Peer,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections that are opened anew must be of the same database."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    async with open_store(folder / "other") as other:
        await other.create(NewSession("of another")).wait()
    (folder / "data").rename(folder / "elsewhere")
    (folder / "other").rename(folder / "data")
    with monkeypatch.context() as patched:  # so that the connections are given up
        patched.setattr(Ledger, "run", commit_fails)
        with pytest.raises(StorageError):
            await peer.call("session.append", session_id="a", items=[user("y")])
    before = (folder / "data" / "store.db").read_bytes()
    for _ in range(2):
        with pytest.raises(StorageError):
            await peer.call("session.append", session_id="a", items=[user("y")])
    assert (folder / "data" / "store.db").read_bytes() == before


@pytest.mark.parametrize("put", [away, an_empty_folder, a_file])
async def test_a_socket_that_went_away_is_told_and_what_is_in_its_place_stays(
    start: Start, folder: Path, put: Callable[[Path], None]
) -> None:
    async with start() as daemon, daemon.connect() as peer:
        assert (await peer.call("server.health"))["ok"]
        daemon.settings.socket.unlink()
        put(daemon.settings.socket)
        health = await peer.call("server.health")
        assert [warning["reason"] for warning in health["warnings"]] == ["socket_gone"]
        await peer.call("session.create", session_id="a")
        await peer.call("server.shutdown")
        await daemon.exit_code()
        assert daemon.settings.socket.exists() is (put is not away)
        if put is an_empty_folder:
            daemon.settings.socket.rmdir()
        else:
            daemon.settings.socket.unlink(missing_ok=True)
