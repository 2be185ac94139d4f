"""Record and break what a process does to the files of one folder (shim.c, by LD_PRELOAD).

A test builds it, starts a child under it, and the child drives it::

    library = build(tmp_path)                       # the test is marked NEEDS_GCC
    subprocess.run([...], env=preloaded(library))

    # in the child
    shim = Shim()
    shim.watch(folder)                              # or watch(folder, only="-wal")
    shim.arm(Kind.SYNC, nth=3, action=Action.FAIL, value=errno.EIO)
    ...                                             # the third fsync below `folder` fails
    shim.fired, shim.count(Kind.SYNC)
    shim.disarm()

Without arming it counts: a first run tells how many calls there are to fail, one after the other.
"""

import ctypes
import os
import shutil
import struct
import subprocess
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Final

import pytest


class Kind(IntFlag):
    """What a call does; several together where one is asked for."""

    OPEN = 1 << 0
    WRITE = 1 << 1
    SYNC = 1 << 2  # fsync and fdatasync, of files and folders
    TRUNCATE = 1 << 3
    RENAME = 1 << 4
    UNLINK = 1 << 5  # and rmdir
    LINK = 1 << 6
    MKDIR = 1 << 7
    READ = 1 << 8  # not recorded
    CLOSE = 1 << 9
    MARK = 1 << 10
    UNKNOWN = 1 << 11  # a call that is not followed


CHANGING: Final = (
    Kind.OPEN
    | Kind.WRITE
    | Kind.SYNC
    | Kind.TRUNCATE
    | Kind.RENAME
    | Kind.UNLINK
    | Kind.LINK
    | Kind.MKDIR
)


class Action(IntEnum):
    """What happens to the n-th call. `value` is an errno, bytes or microseconds."""

    FAIL = 1  # with the errno `value`
    FAIL_FROM_NOW_ON = 2
    KILL_BEFORE = 3
    KILL_AFTER = 4
    SHORT = 5  # a write takes `value` bytes only
    DELAY = 6  # by `value` microseconds


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as it was made. `data`: of a write, as far as it was taken; of a mark, its text."""

    kind: Kind
    ok: bool
    descriptor: int
    path: str = ""
    to: str = ""
    offset: int = 0
    size: int = 0  # of a truncation; the flags of an open
    data: bytes = b""


NEEDS_GCC: Final = pytest.mark.skipif(
    shutil.which("gcc") is None, reason="NOT TESTED: faults of the disk need gcc"
)


def build(folder: Path) -> Path:
    """Compile the shim into `folder`, with gcc."""
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    options = ["-O2", "-fPIC", "-shared", "-o", str(library), str(source), "-ldl", "-lpthread"]
    subprocess.run(["gcc", *options], check=True)
    return library


def preloaded(library: Path) -> dict[str, str]:
    """The environment of a child that runs under it."""
    return {**os.environ, "LD_PRELOAD": str(library)}


class Shim:
    """The shim of this process, which was started with it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.shim_count.restype = ctypes.c_long
        self._library.shim_arm.argtypes = [
            *(ctypes.c_uint, ctypes.c_long, ctypes.c_int, ctypes.c_int),
        ]

    def watch(self, folder: Path, only: str = "") -> None:
        """Look at `folder` and all below it; count and break only what has `only` in its path.

        To be called before anything there is opened.
        """
        self._library.shim_watch(os.fsencode(folder), only.encode())

    def arm(self, kinds: Kind, *, nth: int, action: Action, value: int = 0) -> None:
        """Break the `nth` call of `kinds` from now, counted from 1; counting begins anew."""
        self._library.shim_arm(kinds, nth, action, value)

    def disarm(self) -> None:
        """Let everything work again; counting begins anew."""
        self._library.shim_arm(0, 0, 0, 0)

    def count(self, kinds: Kind) -> int:
        """How many calls of `kinds` there were since the last `arm` or `disarm`."""
        return int(self._library.shim_count(kinds))

    @property
    def fired(self) -> bool:
        """Whether what was armed has happened."""
        return bool(self._library.shim_fired())

    def log(self, descriptor: int) -> None:
        """Record every call that changes something to an open file; -1: no more."""
        self._library.shim_log(descriptor)

    def mark(self, text: str) -> None:
        """Record a mark."""
        self._library.shim_mark(text.encode())


_RECORD: Final = struct.Struct("<BiiiqqII")


def read_log(log: bytes) -> list[Call]:
    """The recorded calls. Raises ValueError if there is one that is not followed."""
    calls: list[Call] = []
    at = 0
    while at < len(log):
        number, result, _, descriptor, offset, size, first, second = _RECORD.unpack_from(log, at)
        at += _RECORD.size
        text, more = log[at : at + first], log[at + first : at + first + second]
        at += first + second
        kind = Kind(1 << number)
        if kind is Kind.UNKNOWN:
            raise ValueError(f"{text.decode()} is not followed")
        data = text if kind in (Kind.WRITE, Kind.MARK) else b""
        path = "" if data else os.fsdecode(text)
        to = os.fsdecode(more)
        calls.append(Call(kind, result >= 0, descriptor, path, to, offset, size, data))
    return calls
