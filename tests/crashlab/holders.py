"""Who has the store's files open, and how (PROMISES.md L2 and L3), seen on a recorded run.

The shim sees that a file is opened and not by whom. Python tells of its own calls (PEP 578), and
SQLite's are not among them; `overhear` writes what matters of them into the record.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from tests.crashlab.shim import Call, Kind

_DATABASE: Final = "store.db"
LOG: Final = "store.db-wal"
_LOCK: Final = "lock"
_LOCKED: Final = fcntl.LOCK_EX | fcntl.LOCK_NB
_TOUCHING: Final = ("open", "os.remove", "os.rename", "os.link", "os.truncate")


def overhear(mark: Callable[[str], None]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that marks "P <event> <name>" for what Python does to the database by itself,
    and "F <descriptor> <operation>" for each flock.

    Not marked: a file that is made and was not there. Nobody has a lock on it.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "fcntl.flock":
            mark("F {} {}".format(*arguments))
        elif event in _TOUCHING and not isinstance(arguments[0], int):  # a descriptor
            name = os.path.basename(os.fsdecode(arguments[0]))
            made = event == "open" and arguments[2] & os.O_EXCL
            if name.startswith(_DATABASE) and not made:
                mark(f"P {event} {name}")

    return hook


def wrong_holders(calls: Sequence[Call]) -> Iterator[str]:
    """What is against L2 (a flock on the lock file is held, opened once, and the database is opened
    by SQLite only) or L3 (one read-write connection, and it alone writes the log and checkpoints).
    """
    paths: dict[int, str] = {}
    writers: set[int] = set()  # descriptors of the database that can write
    logs: set[int] = set()  # descriptors that the log was written by in this life
    lock: int | None = None
    held = False
    for call in calls:
        name = os.path.basename(paths.get(call.descriptor, call.path))
        match call.kind:
            case Kind.MARK:
                what, _, rest = call.data.decode().partition(" ")
                if what == "P":
                    yield f"not SQLite: {rest}"
                elif what == "F":
                    held = rest == f"{lock} {_LOCKED}"
            case Kind.OPEN if call.ok:
                paths[call.descriptor] = call.path
                name = os.path.basename(call.path)
                if name == _LOCK:
                    if lock is not None:
                        yield "the lock is opened twice"
                    lock, held = call.descriptor, False
                    logs.clear()
                elif name == _DATABASE and call.size & os.O_ACCMODE != os.O_RDONLY:
                    if not call.size & os.O_EXCL:  # that is how it is made
                        writers.add(call.descriptor)
                    if len(writers) > 1:
                        yield "two connections can write"
            case Kind.WRITE if name == LOG:
                logs.add(call.descriptor)
                if len(logs) > 1:
                    yield "two connections write the log"
            case Kind.CLOSE:
                if call.descriptor == lock:
                    lock, held = None, False
                writers.discard(call.descriptor)
                paths.pop(call.descriptor, None)
            case _:
                pass
        if call.kind is not Kind.MARK and not held and _needs_lock(name, call.path):
            yield f"{call.kind.name} of {name} without the lock"


def _needs_lock(name: str, path: str) -> bool:
    return name.startswith(_DATABASE) or "/archives" in path


def readers(calls: Sequence[Call]) -> int:
    """How many times the database was opened so that it can only be read."""
    return sum(
        call.kind is Kind.OPEN
        and os.path.basename(call.path) == _DATABASE
        and call.size & os.O_ACCMODE == os.O_RDONLY
        for call in calls
    )
