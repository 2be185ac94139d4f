"""One process at a time, and folders that only their owner can reach.

`flock` and not SQLite's own locks: those are POSIX record locks, and they vanish as soon as
anything in the process opens and closes the database file (sqlite.org/howtocorrupt.html §2.2).
A flock dies with its process.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_NO_FOLDER: Final = {errno.EEXIST, errno.ENOTDIR, errno.ELOOP}  # a file or a link is in its place


class Locked(Exception):
    """Another process holds the lock."""


class UnsafeFolder(Exception):
    """The folder is a link, not a folder, another user's, or others may write to it."""


@contextmanager
def hold(path: Path) -> Generator[None]:
    """Hold the lock file at `path`, made with mode 0600 where there is none. Never waits.

    The file stays: removing it would let two processes lock two files of one name.

    Raises Locked, OSError (ELOOP when it is a symbolic link).
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Locked from error
        yield
    finally:
        os.close(descriptor)


def make_private_folder(folder: Path) -> None:
    """Make the folder, or take it over: afterwards it is ours and has mode 0700.

    Raises UnsafeFolder, OSError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FOLDER:
            raise UnsafeFolder(folder.name) from error
        raise
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UnsafeFolder(folder.name)
        if stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
