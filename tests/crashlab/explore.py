"""Record the store's calls, cut the power at every moment, and see what it makes of each state.

    python -m tests.crashlab.explore [--sample] [--mutants] [--json]

Everything runs in processes under the shim: the workload is recorded in one, and the states are
opened by workers, which record themselves as well, to cut the power a second time.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from tests.crashlab import rules, workload
from tests.crashlab.disk import Disk, Loss, Tree
from tests.crashlab.holders import overhear
from tests.crashlab.mutants import MUTANTS, Mutant
from tests.crashlab.shim import Call, Kind, Shim, build, preloaded, read_log
from tests.crashlab.workload import LIVES, RECOVERED_MS, Clock, Player

from recapd.storage.sqlite import open_store
from recapd.storage.store import Query

STORE: Final = "store"
_SHM: Final = ("absent", "zeros", "junk")
_SHOWN: Final = 3  # violations of a kind


class Violation(Exception):
    """What was found is not what may be."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is looked at. `every`, `samples`: see `Disk.losses`, of which at most `losses_max` a
    moment are taken. Each n-th distinct state is opened `twice`, played to the end (`go_on`), and
    cut a second time while it is opened (`again`).
    """

    every: int
    samples: int
    losses_max: int
    twice: int
    go_on: int
    again: int
    again_losses: int  # of the second cut, at most


ORDINARY: Final = Size(3, 2, losses_max=8, twice=20, go_on=40, again=80, again_losses=8)
LONG: Final = Size(8, 60, losses_max=200, twice=2, go_on=50, again=200, again_losses=60)
UPGRADE: Final = Size(8, 60, losses_max=1000, twice=2, go_on=5, again=5, again_losses=10)
QUICK: Final = Size(2, 1, losses_max=8, twice=10_000, go_on=10_000, again=10_000, again_losses=0)


@dataclass(slots=True)
class Report:
    """What was looked at and found. `states` counts losses, `distinct` different trees."""

    states: int = 0
    trees: set[bytes] = field(default_factory=set[bytes])
    went_on: int = 0
    second: int = 0
    violations: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    def add(self, other: "Report") -> None:
        self.states += other.states
        self.trees |= other.trees
        self.went_on += other.went_on
        self.second += other.second
        self.violations += other.violations


# Recording.


@contextmanager
def recorded(folder: Path) -> Generator[Callable[[], list[Call]]]:
    """Record what is done below `folder`; the calls so far are what the yielded function gives."""
    shim = Shim()
    descriptor = os.memfd_create("calls")
    shim.watch(folder)
    shim.log(descriptor)

    def calls() -> list[Call]:
        shim.log(-1)
        size = os.fstat(descriptor).st_size
        return read_log(os.pread(descriptor, size, 0))

    try:
        yield calls
    finally:
        shim.log(-1)
        os.close(descriptor)


async def _write(folder: Path, mark: Callable[[str], None], shown_ms: Callable[[int], int]) -> None:
    clock = Clock()
    done = 0
    for life in LIVES:
        async with open_store(
            folder, now_ms=lambda: shown_ms(clock()), interrupted=workload.INTERRUPTED
        ) as store:
            mark("ready")
            player = Player(store, clock, done=done, mark=mark)
            await workload.play(player, life)
            done = player.done


def record(
    parent: Path,
    mutant: Mutant | None = None,
    *,
    shown_ms: Callable[[int], int] = lambda now_ms: now_ms,
) -> list[Call]:
    """The calls of the whole story, told to a new store in `parent`, in a process of its own.

    `shown_ms` is what the store's clock shows at a time of the story.
    """

    def run() -> bytes:
        if mutant is not None:
            mutant.while_writing()
        with recorded(parent / STORE) as calls:
            mark = Shim().mark
            sys.addaudithook(overhear(mark))
            anyio.run(_write, parent / STORE, mark, shown_ms)
            return msgspec.msgpack.encode([_flat(call) for call in calls()])

    return [Call(Kind(kind), *rest) for kind, *rest in msgspec.msgpack.decode(_forked(run))]


def record_opening(parent: Path, done: int) -> list[Call]:
    """The calls of opening and closing the store that is in `parent`, behind the two marks that
    it has `done` changes.
    """

    def run() -> bytes:
        with recorded(parent / STORE) as calls:
            Shim().mark(f"B {done}")
            Shim().mark(f"A {done}")
            anyio.run(_write_nothing, parent / STORE, Shim().mark)
            return msgspec.msgpack.encode([_flat(call) for call in calls()])

    return [Call(Kind(kind), *rest) for kind, *rest in msgspec.msgpack.decode(_forked(run))]


async def _write_nothing(folder: Path, mark: Callable[[str], None]) -> None:
    async with open_store(folder, now_ms=Clock(), interrupted=workload.INTERRUPTED):
        mark("ready")


def _flat(call: Call) -> list[Any]:
    return [
        *(int(call.kind), call.ok, call.descriptor, call.path, call.to),
        *(call.offset, call.size, call.data),
    ]


def _forked(run: Callable[[], bytes]) -> bytes:
    """What `run` gives, in a child whose threads and changes end with it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            with open(writing, "wb") as pipe:
                pipe.write(run())
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with open(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    if status:
        raise RuntimeError(f"a child ended with {status}")
    return told


# Opening a state.


def lay(parent: Path, tree: Tree, shm: str) -> None:
    """Put a state on the disk, with a `-shm` of this kind beside the database."""
    shutil.rmtree(parent, ignore_errors=True)
    parent.mkdir()
    for path, data in tree:
        whole = parent / path
        if data is None:
            whole.mkdir(mode=0o700)
            continue
        with open(whole, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
        if path.endswith(".db") and shm != "absent":
            junk = random.Random(len(data)).randbytes(32_768)
            whole.with_name(f"{whole.name}-shm").write_bytes(
                junk if shm == "junk" else bytes(32_768)
            )


def _files(folder: Path) -> set[str]:
    return {
        os.path.relpath(path, folder)
        for path in (folder / "archives").rglob("*")
        if not path.is_dir()
    }


async def _open_and_look(folder: Path, ready: Callable[[], None] = lambda: None) -> bytes:
    """What the store shows that is in `folder`, with its archive files at the end."""
    clock = Clock(RECOVERED_MS)
    async with open_store(folder, now_ms=clock, interrupted=workload.INTERRUPTED) as store:
        ready()
        seen = await workload.look(store)
        named = 0
        for session in await store.sessions(Query()):
            named += len(session.archived_revisions)
        if len(_files(folder)) != named:
            raise Violation(f"{len(_files(folder))} files for {named} archives")
        return seen


async def _open_and_go_on(folder: Path, done: int) -> bytes:
    clock = Clock(RECOVERED_MS)
    async with open_store(folder, now_ms=clock, interrupted=workload.INTERRUPTED) as store:
        return await workload.go_on(store, clock, done)


def _last_change(disk: Disk) -> int:
    return max((int(text[2:]) for _, text in disk.marks if text.startswith("A ")), default=0)


@cache
def _states(changes: int) -> dict[bytes, int]:
    """What may be seen, and the number of changes that it is the state after."""
    return {anyio.run(workload.expected, done): done for done in range(changes + 1)}


class Explorer:
    """Opens states of one recorded run in this process, each distinct one once."""

    def __init__(self, disk: Disk, size: Size, scratch: Path, seed: int) -> None:
        self.report = Report()
        self._disk = disk
        self._size = size
        self._scratch = scratch
        self._random = random.Random(seed)
        self._found: dict[bytes, int | str] = {}  # how many changes are there, or what is wrong
        self._changes = _states(_last_change(disk))

    def explore(self, moments: Sequence[int], enough: Callable[[], bool] = lambda: False) -> Report:
        """Cut at each of these moments, until it is `enough`."""
        for moment in moments:
            if enough():
                break
            least, most = self._promised(moment)
            for loss in self._losses(self._disk, moment, self._size.losses_max):
                self.report.states += 1
                digest, tree = self._disk.tree(moment, loss)
                if digest not in self._found:
                    self._found[digest] = self._open(tree, moment, loss, least, most)
                self._judge(self._found[digest], least, most, self._disk.describe, moment, loss)
        self.report.trees |= self._found.keys()
        shutil.rmtree(self._scratch, ignore_errors=True)
        return self.report

    def _losses(self, disk: Disk, moment: int, most: int) -> list[Loss]:
        """Some of those of a moment; all and nothing are among them."""
        size = self._size
        losses = [*disk.losses(moment, self._random, every=size.every, samples=size.samples)]
        if len(losses) <= most:
            return losses
        return losses[:2] + self._random.sample(losses[2:], most - 2)

    def _promised(self, moment: int) -> tuple[int, int]:
        """The least and the greatest number of changes that may be there."""
        least = most = 0
        for index, text in self._disk.marks:
            if index >= moment:
                break
            what, _, number = text.partition(" ")
            if what == "A":
                least = int(number)
            elif what == "B":
                most = int(number)
        return least, most

    def _judge(
        self,
        found: int | str,
        least: int,
        most: int,
        describe: Callable[[int, Loss], str],
        moment: int,
        loss: Loss,
    ) -> None:
        if isinstance(found, str):
            self._complain(found, describe(moment, loss))
        elif found < least:
            self._complain(
                f"change {least} was acknowledged, {found} came back", describe(moment, loss)
            )
        elif found > most:
            self._complain(f"change {found} came back, {most} was begun", describe(moment, loss))

    def _complain(self, what: str, where: str) -> None:
        self.report.violations.append(f"{what} — {where}")

    def _open(self, tree: Tree, moment: int, loss: Loss, least: int, most: int) -> int | str:
        count = len(self._found) + 1
        lay(self._scratch, tree, _SHM[count % len(_SHM)])
        folder = self._scratch / STORE
        try:
            if count % self._size.again == 0:
                found = self._cut_again(tree, moment, loss, least, most)
            else:
                found = self._count(anyio.run(_open_and_look, folder))
            if count % self._size.twice == 0:
                if self._count(anyio.run(_open_and_look, folder)) != found:
                    return "a second opening finds something else"
            if count % self._size.go_on == 0:
                self.report.went_on += 1
                if anyio.run(_open_and_go_on, folder, found) != anyio.run(
                    lambda: workload.expected(found, to_the_end=True)
                ):
                    return f"going on from {found} ends elsewhere"
            return found
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def _count(self, seen: bytes) -> int:
        if seen not in self._changes:
            raise Violation("it is the state after no number of changes")
        return self._changes[seen]

    def _cut_again(self, tree: Tree, moment: int, loss: Loss, least: int, most: int) -> int:
        """Open a state, and cut the power at moments of that as well."""
        shim = Shim()
        with recorded(self._scratch / STORE) as calls:
            seen = anyio.run(_open_and_look, self._scratch / STORE, lambda: shim.mark("ready"))
            made = calls()
        shim.watch(Path("/nowhere"))
        found = self._count(seen)
        second = Disk(made, self._scratch, tree)
        ready = next(index for index, text in second.marks if text == "ready")
        losses = [
            (at, one)
            for at in second.moments()
            for one in self._losses(second, at, self._size.again_losses)
        ]
        self._random.shuffle(losses)
        for at, one in losses[: self._size.again_losses]:
            self.report.second += 1
            lay(self._scratch, second.tree(at, one)[1], _SHM[at % len(_SHM)])
            after = self._count(anyio.run(_open_and_look, self._scratch / STORE))
            if at > ready:
                self._judge(after, found, found, second.describe, at, one)
            else:
                self._judge(after, least, most, second.describe, at, one)
        lay(self._scratch, tree, "absent")
        anyio.run(_open_and_look, self._scratch / STORE)
        return found


def explore(calls: list[Call], root: Path, size: Size, *, mutant: str | None = None) -> Report:
    """Cut at every moment of a recorded run, on several processes."""
    start_s = time.perf_counter()
    disk = Disk(calls, root)
    moments = disk.moments()
    _states(_last_change(disk))  # once, for all workers
    parts = [moments[part::_PARTS] for part in range(_PARTS)]
    jobs = [(calls, root, part, size, seed, mutant) for seed, part in enumerate(parts)]
    report = Report()
    _caught.clear()
    with multiprocessing.get_context("fork").Pool(_PROCESSES) as pool:
        for one in pool.imap_unordered(_work, jobs):
            report.add(one)
    report.seconds = time.perf_counter() - start_s
    return report


_caught: Final = multiprocessing.get_context("fork").Event()  # a mutant, by one of the workers
_PROCESSES: Final = 3  # a start waits for its threads a good part of the time
_PARTS: Final = 24


def _work(
    job: tuple[list[Call], Path, list[int], Size, int, str | None],
) -> Report:
    calls, root, moments, size, seed, mutant = job
    if mutant is not None:
        MUTANTS[mutant].while_opening()
    shared = Path("/dev/shm")
    scratch = tempfile.mkdtemp(prefix="recapd-", dir=shared if shared.is_dir() else None)
    try:
        explorer = Explorer(Disk(calls, root), size, Path(scratch) / "state", seed)

        def enough() -> bool:
            if mutant is not None and explorer.report.violations:
                _caught.set()
            return _caught.is_set()

        return explorer.explore(moments, enough)
    finally:
        shutil.rmtree(scratch)


def catch(mutant: str, parent: Path) -> Report:
    """Record without a rule of `MUTANTS`, and look for a violation."""
    parent.mkdir()
    return explore(record(parent, MUTANTS[mutant]), parent, QUICK, mutant=mutant)


def main() -> int:
    """See the module; 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="scripts/crashlab")
    parser.add_argument("--sample", action="store_true", help="what the ordinary tests look at")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="recapd-") as folder:
            command = [sys.executable, "-m", "tests.crashlab.explore", *sys.argv[1:]]
            return subprocess.run(
                command, env=preloaded(build(Path(folder))), check=False
            ).returncode
    rows: dict[str, dict[str, Any]] = {}
    wrong = False
    with tempfile.TemporaryDirectory(prefix="recapd-") as folder:
        root = Path(folder)
        size = ORDINARY if options.sample else LONG
        (root / "new").mkdir()
        calls = record(root / "new")
        disk = Disk(calls, root / "new")
        broken = [*rules.broken_order(disk)]
        reports = {"the story": explore(calls, root / "new", size)}
        reports["the story"].violations += broken
        (root / "older").mkdir()
        done = anyio.run(workload.make_older_store, root / "older" / STORE)
        reports["the upgrade"] = explore_upgrade(root / "older", done)
        for name, report in reports.items():
            wrong |= bool(report.violations)
            rows[name] = _row(report)
        for name in MUTANTS:
            report = catch(name, root / name)
            wrong |= not report.violations
            rows[f"without {name}"] = _row(report)
    if options.json:
        print(json.dumps({"crashlab": rows, "syncs": rules.syncs(disk)}))
    else:
        columns = ("states", "distinct", "went_on", "second", "seconds", "violations")
        print(f"{'':38}" + "".join(f"{column:>11}" for column in columns))
        for name, row in rows.items():
            print(f"{name:38}" + "".join(f"{row[column]:11}" for column in columns))
        for report in reports.values():
            print(*report.violations[:_SHOWN], sep="\n")
    return int(wrong)


def explore_upgrade(parent: Path, done: int) -> Report:
    """Cut while a store of an older schema is opened, which has `done` changes of the story.

    There are few states, and all of them are opened.
    """
    initial = read_tree(parent)
    calls = record_opening(parent, done)
    start_s = time.perf_counter()
    scratch = Path(tempfile.mkdtemp(prefix="recapd-"))
    disk = Disk(calls, parent, initial)
    try:
        explorer = Explorer(disk, UPGRADE, scratch / "state", 0)
        report = explorer.explore(disk.moments()[2:])  # behind the marks
    finally:
        shutil.rmtree(scratch)
    report.seconds = time.perf_counter() - start_s
    return report


def read_tree(parent: Path) -> Tree:
    """What is on the disk."""
    return [
        (os.path.relpath(path, parent), None if path.is_dir() else path.read_bytes())
        for path in sorted(parent.rglob("*"))
    ]


def _row(report: Report) -> dict[str, Any]:
    return {
        "states": report.states,
        "distinct": len(report.trees),
        "went_on": report.went_on,
        "second": report.second,
        "seconds": round(report.seconds, 1),
        "violations": len(report.violations),
        "examples": report.violations[:_SHOWN],
    }


if __name__ == "__main__":
    sys.exit(main())
