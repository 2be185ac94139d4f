"""A restored store takes the place of the old one, wholly or not at all.

::

    <store>/restoring/  is being filled; where a crash leaves it, it goes
    <store>/restored/   complete and synced: from that rename on, this is the store

What is in `restored` is moved to its place, the old store removed before. Both can be cut short and
are then made again, by the next start or the next restore: `finish` is the first thing that either
does. All of it under the store's lock.
"""

import os
import shutil
import stat
from pathlib import Path
from typing import Final

from recapd.storage.archive import sync_folder
from recapd.storage.lock import UnsafeFolder

_BESIDE_DATABASE: Final = ("store.db-wal", "store.db-shm", "store.db-journal")


def prepare(folder: Path) -> Path:
    """An empty folder for the new store: `store.db` and `archives`, both, are to be put there.

    Raises UnsafeFolder, OSError.
    """
    discard(folder)
    staging = folder / "restoring"
    staging.mkdir(mode=0o700)
    return staging


def discard(folder: Path) -> None:
    """Remove a new store that was not committed. Raises UnsafeFolder, OSError."""
    if _is_there(folder / "restoring"):
        shutil.rmtree(folder / "restoring")


def commit(folder: Path) -> None:
    """The new store, all synced within, is the store from now on; durable on return.

    Raises UnsafeFolder, OSError: and it is the old one or the new one, as `finish` will find.
    """
    sync_folder(folder / "restoring")
    os.rename(folder / "restoring", folder / "restored")
    sync_folder(folder)
    finish(folder)


def finish(folder: Path) -> None:
    """Finish a restore that was committed, and remove one that was not.

    Raises UnsafeFolder, OSError.
    """
    discard(folder)
    restored = folder / "restored"
    if not _is_there(restored):
        return
    # Each removal is durable before what replaces it: a log would be read into the other database.
    if _is_there(restored / "archives"):
        if _is_there(folder / "archives"):
            shutil.rmtree(folder / "archives")
        sync_folder(folder)
        _move("archives", restored, folder)
    if (restored / "store.db").exists():
        for name in _BESIDE_DATABASE:
            (folder / name).unlink(missing_ok=True)
        sync_folder(folder)
        _move("store.db", restored, folder)
    restored.rmdir()
    sync_folder(folder)


def _move(name: str, source: Path, target: Path) -> None:
    os.rename(source / name, target / name)
    sync_folder(target)
    sync_folder(source)


def _is_there(path: Path) -> bool:
    """Whether a folder of ours lies there. Raises UnsafeFolder for anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UnsafeFolder(path.name)
    return True
