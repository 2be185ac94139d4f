"""One process holds a store, and only its owner can reach it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recapd.storage.lock import Locked, UnsafeFolder, hold, make_private_folder

HOLD = """
import sys
from pathlib import Path
from recapd.storage.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def mode(path: Path) -> int:
    return path.lstat().st_mode & 0o7777


# The lock.


@pytest.mark.promise("L1")
def test_a_second_holder_is_refused_at_once_and_the_next_one_is_not(tmp_path: Path) -> None:
    """Promise 10: a second one says so and leaves."""
    with hold(tmp_path / "lock"):
        for _ in range(2):
            with pytest.raises(Locked), hold(tmp_path / "lock"):
                pass
    with hold(tmp_path / "lock"):
        pass


@pytest.mark.promise("L1", "L2")
def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    """PROMISES.md L1: after kill -9 the next one starts at once."""
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Locked), hold(path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=10)
        with hold(path):
            pass


@pytest.mark.promise("L2")
def test_a_lock_outlives_every_other_descriptor_of_its_file(tmp_path: Path) -> None:
    """PROMISES.md A.7: SQLite's own locks would be gone after this."""
    path = tmp_path / "lock"
    with hold(path):
        path.read_bytes()
        with pytest.raises(Locked), hold(path):
            pass


def test_the_lock_file_stays_and_is_private(tmp_path: Path) -> None:
    """Two processes would otherwise lock two files of one name; promise 11."""
    path = tmp_path / "lock"
    with hold(path):
        inode = path.stat().st_ino
    assert path.stat().st_ino == inode
    assert mode(path) == 0o600


@pytest.mark.promise("S4")
@pytest.mark.parametrize("target", ["a file", "nothing", "a folder"])
def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path, target: str) -> None:
    """PROMISES.md S4."""
    elsewhere = tmp_path / "elsewhere"
    if target == "a file":
        elsewhere.touch()
    elif target == "a folder":
        elsewhere.mkdir()
    (tmp_path / "lock").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic"), hold(tmp_path / "lock"):
        pass
    assert elsewhere.exists() == (target != "nothing")


# Folders.


@pytest.mark.promise("S1")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_new_folder_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """PROMISES.md S1: from the first moment."""
    before = os.umask(umask)
    try:
        make_private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a" / "b") == 0o700


@pytest.mark.parametrize("found", [0o755, 0o750, 0o500, 0o1700, 0o700])
def test_a_folder_that_others_may_only_read_is_made_private(tmp_path: Path, found: int) -> None:
    """Promise 11: it is taken over."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(found)
    make_private_folder(tmp_path / "store")
    assert mode(tmp_path / "store") == 0o700


@pytest.mark.promise("S1")
@pytest.mark.parametrize("found", [0o770, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, found: int) -> None:
    """PROMISES.md S1: who knows what they wrote."""
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(found)
    with pytest.raises(UnsafeFolder):
        make_private_folder(tmp_path / "store")
    assert mode(tmp_path / "store") == found


@pytest.mark.promise("S1")
def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PROMISES.md S1."""
    make_private_folder(tmp_path / "store")
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(UnsafeFolder):
        make_private_folder(tmp_path / "store")


@pytest.mark.parametrize("what", ["a link to a folder", "a dangling link", "a file", "a pipe"])
def test_what_is_no_folder_is_refused(tmp_path: Path, what: str) -> None:
    """PROMISES.md S4: links are not followed, and the refusal says what it is about."""
    path = tmp_path / "store"
    (tmp_path / "folder").mkdir(mode=0o755)
    match what:
        case "a link to a folder":
            path.symlink_to(tmp_path / "folder")
        case "a dangling link":
            path.symlink_to(tmp_path / "nothing")
        case "a file":
            path.touch()
        case _:
            os.mkfifo(path)
    with pytest.raises(UnsafeFolder):
        make_private_folder(path)
    assert mode(tmp_path / "folder") == 0o755
    assert not (tmp_path / "nothing").exists()
