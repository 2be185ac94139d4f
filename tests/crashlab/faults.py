"""Let each call to the disk fail in turn, and see what the store answers and what is there.

    python -m tests.crashlab.faults [--every N] [--json]

A short story is told to the real store as often as it makes calls; each time another one fails. An
answer must be true: an error that is not "unknown" means that nothing was made, an event that was
told means that it was. Once the fault is gone the same store goes on, and the story ends as if
nothing had happened.
"""

import argparse
import errno
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import anyio
from tests.crashlab import workload
from tests.crashlab.shim import CHANGING, Action, Kind, Shim, build, preloaded
from tests.crashlab.workload import SHORT, Clock, Player

from recapd.storage.errors import OutcomeUnknown, StorageError, StorageFull
from recapd.storage.pending import Pending
from recapd.storage.sqlite import open_store
from recapd.storage.store import Kind as Reason
from recapd.storage.store import Page, Query, Revision, Session, Store

T = TypeVar("T")

_PROCESSES: Final = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the n-th call of these kinds, to files with `only` in their path."""

    kinds: Kind
    action: Action
    value: int
    only: str = ""


FAULTS: Final[dict[str, Fault]] = {
    "ENOSPC once": Fault(
        Kind.WRITE | Kind.OPEN | Kind.MKDIR | Kind.RENAME, Action.FAIL, errno.ENOSPC
    ),
    "ENOSPC from now on": Fault(
        Kind.WRITE | Kind.OPEN | Kind.MKDIR | Kind.RENAME, Action.FAIL_FROM_NOW_ON, errno.ENOSPC
    ),
    "EDQUOT from now on": Fault(Kind.WRITE, Action.FAIL_FROM_NOW_ON, errno.EDQUOT),
    "EIO once": Fault(CHANGING, Action.FAIL, errno.EIO),
    "EIO of each sync from now on": Fault(Kind.SYNC, Action.FAIL_FROM_NOW_ON, errno.EIO),
    "EIO of a read": Fault(Kind.READ, Action.FAIL, errno.EIO),
    "EROFS from now on": Fault(CHANGING & ~Kind.SYNC, Action.FAIL_FROM_NOW_ON, errno.EROFS),
    "EMFILE from now on": Fault(Kind.OPEN, Action.FAIL_FROM_NOW_ON, errno.EMFILE),
    "a short write": Fault(Kind.WRITE, Action.SHORT, 7),
}


class Untrue(Exception):
    """The store's answer and what is there do not agree."""


@cache
def _states() -> dict[bytes, int]:
    async def states() -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for done in range(100):
            seen = await workload.live(SHORT, done)
            if seen in found:
                break
            found[seen] = done
        return found

    return anyio.run(states)


class Doubter(Player):
    """Takes no answer for granted: after an error it looks what is there, and makes the change
    again if it is not.
    """

    def __init__(self, store: Store, clock: Clock, shim: Shim, fault: Fault) -> None:
        self.told = 0
        self.errors: list[str] = []
        self._shim = shim
        self._fault = fault
        super().__init__(store, clock, mark=self._hear)

    def _hear(self, text: str) -> None:
        if text.startswith("A "):
            self.told = int(text[2:])

    async def change(self, make: Callable[[], Pending[T]]) -> T:
        number = self.done + 1
        self.told = self.done
        try:
            return await super().change(make)
        except (StorageError, OutcomeUnknown) as error:
            self.failed(error)
            told = self.told
            found = _states().get(await workload.look(self.store))
            unknown = isinstance(error, OutcomeUnknown)
            if found is None or found not in ((number - 1, number) if unknown else (number - 1,)):
                raise Untrue(
                    f"{type(error).__name__}, and {found} of {number} are there"
                ) from error
            if told > found:
                raise Untrue("an event of what was not made") from error
            if found == number - 1:
                return await super().change(make)
            self.done = number
            return None  # type: ignore[return-value]  # no act looks at it

    async def session(self, session_id: str) -> Session:
        return await self._twice(lambda: super(Doubter, self).session(session_id))

    async def page(self, session_id: str, revision: int) -> Page:
        return await self._twice(lambda: super(Doubter, self).page(session_id, revision))

    async def archive(self, session: Session, kind: Reason, operation_id: str) -> Revision:
        return await self._twice(lambda: super(Doubter, self).archive(session, kind, operation_id))

    async def _twice(self, attempt: Callable[[], Awaitable[T]]) -> T:
        try:
            return await attempt()
        except StorageError as error:
            self.failed(error)
            return await attempt()

    def failed(self, error: Exception) -> None:
        """The disk is well again; was the error one that the fault explains?"""
        if not self._shim.fired:
            raise Untrue(f"{type(error).__name__} without a fault") from error
        full = self._fault.value in (errno.ENOSPC, errno.EDQUOT) and self._fault.action != 5
        if isinstance(error, StorageFull) and not (full or self._fault.action is Action.SHORT):
            raise Untrue("a full disk, which it was not") from error
        self._shim.disarm()
        self.errors.append(type(error).__name__)


async def tell(folder: Path, fault: Fault, nth: int, shim: Shim) -> tuple[bool, list[str]]:
    """Tell the story with one fault: did it happen, and what errors were there?"""
    clock = Clock()
    shim.watch(folder, fault.only)
    shim.arm(fault.kinds, nth=nth, action=fault.action, value=fault.value)
    errors: list[str] = []
    async with AsyncExitStack() as stack:
        try:
            store = await stack.enter_async_context(open_store(folder, now_ms=clock))
        except (StorageError, OSError) as error:
            if not shim.fired:
                raise
            errors.append(type(error).__name__)
            shim.disarm()
            store = await stack.enter_async_context(open_store(folder, now_ms=clock))
        player = Doubter(store, clock, shim, fault)
        for act in SHORT:
            await act(player)
        errors += player.errors
    fired = shim.fired
    shim.disarm()
    async with open_store(folder, now_ms=clock) as store:
        if _states().get(await workload.look(store)) != player.done:
            raise Untrue("it ends elsewhere")
        named = sum(len(s.archived_revisions) for s in await store.sessions(Query()))
        files = [path for path in (folder / "archives").rglob("*") if not path.is_dir()]
        if len(files) != named:
            raise Untrue(f"{len(files)} files for {named} archives")
    return fired or bool(errors), errors


def _try(job: tuple[str, int]) -> tuple[str, int, bool, list[str], str]:
    name, nth = job
    parent = Path(tempfile.mkdtemp(prefix="recapd-"))
    try:
        fired, errors = anyio.run(tell, parent / "store", FAULTS[name], nth, Shim())
    except Exception as error:
        told = "".join(traceback.format_exception(error))
        return name, nth, True, [], f"{name}, call {nth}: {told}"
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    return name, nth, fired, errors, ""


def count(fault: Fault) -> int:
    """How many calls the story makes that the fault may hit."""
    parent = Path(tempfile.mkdtemp(prefix="recapd-"))
    shim = Shim()

    async def run() -> None:
        clock = Clock()
        shim.watch(parent / "store", fault.only)
        shim.disarm()
        for acts in ((), SHORT):
            async with open_store(parent / "store", now_ms=clock) as store:
                await workload.play(Player(store, clock), acts)

    anyio.run(run)
    shutil.rmtree(parent)
    return shim.count(fault.kinds)


def main() -> int:
    """See the module; 1 when an answer was untrue."""
    parser = argparse.ArgumentParser(prog="tests.crashlab.faults")
    parser.add_argument("--every", type=int, default=1, help="let each n-th call fail")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="recapd-") as folder:
            command = [sys.executable, "-m", "tests.crashlab.faults", *sys.argv[1:]]
            environment = preloaded(build(Path(folder)))
            return subprocess.run(command, env=environment, check=False).returncode
    _states()
    jobs = [
        (name, nth)
        for name, fault in FAULTS.items()
        for nth in range(1, count(fault) + 1, options.every)
    ]
    rows: dict[str, dict[str, Any]] = {
        name: {"cases": 0, "fired": 0, "errors": {}, "untrue": []} for name in FAULTS
    }
    with multiprocessing.get_context("fork").Pool(_PROCESSES) as pool:
        for name, _, fired, errors, untrue in pool.imap_unordered(_try, jobs):
            row = rows[name]
            row["cases"] += 1
            row["fired"] += fired
            for error in errors:
                row["errors"][error] = row["errors"].get(error, 0) + 1
            row["untrue"] += [untrue] if untrue else []
    if options.json:
        print(json.dumps({"faults": rows}))
    else:
        for name, row in rows.items():
            print(f"{name:30}{row['cases']:6}{row['fired']:6}  {row['errors']}")
            print(*row["untrue"][:5], sep="\n")
    return int(any(row["untrue"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
