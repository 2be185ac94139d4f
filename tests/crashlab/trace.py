"""What holds of a recorded run itself, without a cut: who has which file open, and that the clock
decides nothing. To be run under the shim.

    python -m tests.crashlab.trace

prints JSON: what is wrong with the run, and what is found once a rule is broken on purpose.
"""

import fcntl
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import anyio
from tests.crashlab import rules, workload
from tests.crashlab.disk import Disk
from tests.crashlab.explore import STORE, record
from tests.crashlab.holders import LOG, readers, wrong_holders
from tests.crashlab.mutants import MUTANTS, Mutant
from tests.crashlab.shim import Call, Kind
from tests.crashlab.workload import START_MS, Clock

from recapd.storage import database, sqlite
from recapd.storage.ledger import Ledger
from recapd.storage.sqlite import open_store

# Clocks (PROMISES.md T1).

_MONTH_MS: Final = 30 * 86_400_000
_JUMP_MS: Final = START_MS + 7000  # in the middle of the first life

CLOCKS: Final[dict[str, Callable[[int], int]]] = {
    "a month on": lambda now_ms: now_ms + _MONTH_MS,
    "a month back": lambda now_ms: now_ms - _MONTH_MS,
    "jumps a month on": lambda now_ms: now_ms + _MONTH_MS * (now_ms >= _JUMP_MS),
    "jumps a month back": lambda now_ms: now_ms - _MONTH_MS * (now_ms >= _JUMP_MS),
    "runs backwards": lambda now_ms: 2 * START_MS - now_ms,
    "stands still": lambda _: START_MS,
}


_TIME: Final = re.compile(r"\b179\d{10}\b|202\d-\d\d-\d\dT[\d:.]+Z")


@dataclass(frozen=True, slots=True)
class Told:
    """A run as it is under any clock: its calls in order, and what is there at the end.

    Left out of the calls are those to the database: when old rows are removed is up to the threads.
    """

    calls: list[str]
    seen: str


def tell(parent: Path, calls: list[Call]) -> Told:
    """What is to be compared of a run in `parent`."""
    outline: list[str] = []
    paths: dict[int, str] = {}
    for call in calls:
        if call.kind is Kind.OPEN:
            paths[call.descriptor] = call.path
        path = call.path or paths.get(call.descriptor, "")
        reads = call.kind is Kind.OPEN and not call.size & os.O_CREAT
        if call.kind is Kind.CLOSE or reads or "/store.db" in path:
            continue
        what = f"{call.kind.name} {call.ok} {path} {call.to} "
        what += call.data.decode() if call.kind is Kind.MARK else ""
        outline.append(re.sub(r"\.[0-9a-f]+\.tmp", ".tmp", what.replace(str(parent), "")))
    return Told(outline, anyio.run(_see, parent / STORE))


async def _see(folder: Path) -> str:
    async with open_store(folder, now_ms=Clock(), interrupted=workload.INTERRUPTED) as store:
        return _TIME.sub("a time", repr(await workload.see(store)))


# Rules to break.


def _read_by_python() -> None:
    run = Ledger.run

    def run_and_read(self: Ledger, changes: Any) -> Any:
        path: str = getattr(self, "_db").execute("PRAGMA database_list").fetchone()[2]  # noqa: B009
        Path(path).read_bytes()
        return run(self, changes)

    setattr(Ledger, "run", run_and_read)  # noqa: B010


def _readers_that_can_write() -> None:
    uri: Callable[[Path, str], str] = getattr(database, "_uri")  # noqa: B009

    def writable(path: Path, _: str) -> str:
        return uri(path, "rw")

    setattr(database, "_uri", writable)  # noqa: B010


def _lock_that_is_let_go() -> None:
    @contextmanager
    def hold(path: Path) -> Generator[None]:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
        yield

    setattr(sqlite, "hold", hold)  # noqa: B010


def _lock_that_is_only_opened() -> None:
    def flock(*_: object) -> None:
        pass

    setattr(fcntl, "flock", flock)  # noqa: B010


def _lock_that_others_may_have() -> None:
    flock = fcntl.flock

    def shared(descriptor: int, _: int) -> None:
        flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)

    setattr(fcntl, "flock", shared)  # noqa: B010


def _order_by_the_clock() -> None:
    """An event is only told when it is younger than what came before."""
    last_ms = [0]
    publish: Callable[..., None] = getattr(sqlite.SqliteStore, "_publish")  # noqa: B009

    def publish_younger(self: Any, events: Any) -> None:
        now_ms: int = getattr(self, "_now_ms")()  # noqa: B009
        if now_ms > last_ms[0]:
            publish(self, events)
        last_ms[0] = now_ms

    setattr(sqlite.SqliteStore, "_publish", publish_younger)  # noqa: B010


HOLDERS: Final[dict[str, Mutant]] = {
    "SQLite alone opens the database": Mutant(_read_by_python),
    "readers only read": Mutant(_readers_that_can_write),
    "the lock is held": Mutant(_lock_that_is_let_go),
    "the lock is taken": Mutant(_lock_that_is_only_opened),
    "the lock is exclusive": Mutant(_lock_that_others_may_have),
}

ORDERS: Final = (
    "sync of the archive",
    "sync of its folder",
    "sync of each commit",
    "archive before commit",
)
"""Those of MUTANTS that break D3."""


def _written_by_another(calls: list[Call]) -> list[Call]:
    """The log is written for the second change by a connection that only reads."""
    logs = [call.descriptor for call in calls if call.kind is Kind.OPEN and call.path.endswith(LOG)]
    end = next(index for index, call in enumerate(calls) if call.data == b"A 2")
    last = max(index for index in range(end) if calls[index].kind is Kind.WRITE)
    other = replace(calls[last], descriptor=next(d for d in logs if d != calls[last].descriptor))
    return [*calls[:last], other, *calls[last + 1 :]]


def main() -> int:
    """See the module."""
    with tempfile.TemporaryDirectory(prefix="recapd-") as folder:

        def new(**how: Any) -> tuple[Path, list[Call]]:
            parent = Path(tempfile.mkdtemp(dir=folder))
            return parent, record(parent, **how)

        parent, calls = new()
        steady = tell(parent, calls)
        disk = Disk(calls, parent)
        orders: dict[str, list[str]] = {}
        for name in ORDERS:
            broken, made = new(mutant=MUTANTS[name])
            orders[name] = [*rules.broken_order(Disk(made, broken))]
        holders = {name: [*wrong_holders(new(mutant=one)[1])] for name, one in HOLDERS.items()}
        holders["one connection writes the log"] = [*wrong_holders(_written_by_another(calls))]
        others = {name: tell(*new(shown_ms=shown)) for name, shown in CLOCKS.items()}
        misled = tell(*new(mutant=Mutant(_order_by_the_clock), shown_ms=CLOCKS["runs backwards"]))
    printed = {
        "order": [*rules.broken_order(disk)],
        "holders": [*wrong_holders(calls)],
        "readers": readers(calls),
        "outline": len(steady.calls),
        "clocks": {
            name: {"calls": told.calls == steady.calls, "seen": told.seen == steady.seen}
            for name, told in others.items()
        },
        "clock that decides": {"calls": misled.calls == steady.calls},
        "without": {name: found[:3] for name, found in (orders | holders).items()},
    }
    print(json.dumps(printed, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
