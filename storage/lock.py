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

from recapd.storage.errors import Unsafe

_NO_FOLDER: Final = {errno.EEXIST, errno.ENOTDIR, errno.ELOOP}  # a file or a link is in its place


class Locked(Exception):
    """Another process holds the lock."""


class UnsafeFolder(Exception):
    """The folder is a link, not a folder, another user's, or others may write to it."""


def check_private(name: str, status: os.stat_result) -> None:
    """Is it a plain file of this user, and has it one name only? Raises Unsafe."""
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        raise Unsafe(f"{name} is not a plain file of this user")


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a plain file of ours; made with mode 0600 where there is none and O_CREAT.

    Raises Unsafe, OSError (ELOOP when it is a symbolic link).
    """
    # A pipe would hold up who opens it.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    try:
        check_private(path.name, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def hold(path: Path) -> Generator[None]:
    """Hold the lock file at `path`, made with mode 0600 where there is none. Never waits.

    The file stays: removing it would let two processes lock two files of one name.

    Raises Locked, Unsafe, OSError (ELOOP when it is a symbolic link).
    """
    descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
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
