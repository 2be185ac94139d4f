"""What may not lie in the store's folder: nothing of it is followed, waited for or written to.

The folder is its owner's alone, so only he, or a copy that he made, can have put it there.
"""

import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import chdir
from pathlib import Path

import pytest

from recapd.storage.archive import archive_path
from recapd.storage.errors import ArchiveMissing, StorageError
from recapd.storage.lock import UnsafeFolder
from recapd.storage.sqlite import open_store
from recapd.storage.store import NewItem, NewSession, Session

Compact = Callable[..., Awaitable[Session]]

ITEM = NewItem(b'{"role":"user","content":"hello"}', 3)
SECRET = b"somebody else's"


def a_link(path: Path, elsewhere: Path) -> None:
    elsewhere.write_bytes(SECRET)
    path.symlink_to(elsewhere)


def a_dangling_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def a_link_to_a_folder(path: Path, elsewhere: Path) -> None:
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


def a_second_name(path: Path, elsewhere: Path) -> None:
    elsewhere.write_bytes(SECRET)
    path.hardlink_to(elsewhere)


def a_pipe(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path, elsewhere: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)  # the whole path may be too long for one


def a_folder(path: Path, elsewhere: Path) -> None:
    path.mkdir(mode=0o700)


Put = Callable[[Path, Path], None]
KINDS: list[Put] = [a_link, a_dangling_link, a_link_to_a_folder, a_pipe, a_socket]


def found(elsewhere: Path) -> object:
    if elsewhere.is_dir():
        return os.listdir(elsewhere)
    return elsewhere.read_bytes() if elsewhere.exists() else None


@pytest.mark.promise("S4")
@pytest.mark.parametrize("put", [*KINDS, a_second_name, a_folder])
@pytest.mark.parametrize("name", ["lock", "store.db", "store.db-wal", "store.db-shm"])
async def test_what_is_no_plain_file_of_one_name_is_refused(
    folder: Path, tmp_path: Path, name: str, put: Put
) -> None:
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
    (folder / name).unlink(missing_ok=True)
    elsewhere = tmp_path / "elsewhere"
    put(folder / name, elsewhere)
    before, status = found(elsewhere), (folder / name).lstat()
    with pytest.raises((StorageError, OSError)):
        async with open_store(folder):
            pass
    after = (folder / name).lstat()
    assert found(elsewhere) == before
    assert (after.st_ino, after.st_mode, after.st_size) == (
        *(status.st_ino, status.st_mode, status.st_size),
    )


@pytest.mark.promise("S4")
@pytest.mark.parametrize("put", [*KINDS, a_second_name])
async def test_what_is_no_folder_is_refused_in_place_of_the_archives(
    folder: Path, tmp_path: Path, put: Put
) -> None:
    async with open_store(folder):
        pass
    (folder / "archives").rmdir()
    put(folder / "archives", tmp_path / "elsewhere")
    before = found(tmp_path / "elsewhere")
    with pytest.raises((UnsafeFolder, OSError)):
        async with open_store(folder):
            pass
    assert found(tmp_path / "elsewhere") == before


@pytest.mark.promise("S4")
@pytest.mark.parametrize("put", [*KINDS, a_folder])
async def test_what_is_no_plain_file_is_never_an_archive(
    folder: Path, tmp_path: Path, compact: Compact, put: Put
) -> None:
    """It is missing; the session is served all the same."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        await compact(store, "s", "o")
        path = archive_path(folder / "archives", "s", 1)
        path.unlink()
        put(path, tmp_path / "elsewhere")
        before = found(tmp_path / "elsewhere")
        with pytest.raises(ArchiveMissing):
            await store.page("s", revision=1, limit=10, bytes_max=1 << 20)
        verified = await store.verify("s", read=lambda _: True)
        assert [fault.kind for fault in verified.faults] == ["archive_missing"]
        await store.append("s", [ITEM]).wait()
    assert found(tmp_path / "elsewhere") == before


@pytest.mark.promise("S4")
async def test_archives_are_not_read_from_or_written_to_behind_a_link(
    folder: Path, tmp_path: Path, compact: Compact
) -> None:
    """In place of the folder of a session, although the right file lies there."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
        await compact(store, "s", "o")
        path = archive_path(folder / "archives", "s", 1)
        path.parent.rename(tmp_path / "elsewhere")
        path.parent.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ArchiveMissing):
            await store.page("s", revision=1, limit=10, bytes_max=1 << 20)
    async with open_store(folder) as store:
        await store.append("s", [ITEM]).wait()
        path.parent.unlink(missing_ok=True)
        path.parent.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(StorageError):
            await compact(store, "s", "p")
    assert [one.name for one in (tmp_path / "elsewhere").iterdir()] == [path.name]
