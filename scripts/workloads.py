"""What `scripts/bench` makes a daemon do; each workload starts its own and gives figures by name.

Times are in the unit that the row of the figure says. Where a workload measures two things that are
compared with each other, it does them in turn, so that a slow moment falls on both.
"""

import select
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.targets import MADE, ROOT, Name, Target, Wire, item, items, running

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    appends: int = 1000
    rounds: int = 15  # of 100 sessions at once
    history: int = 10_000  # items
    reads: int = 7
    sessions: int = 10_000
    many_sessions: int = 100_000
    pings: int = 3000
    flood: int = 30_000
    starts: int = 5
    touched: int = 1000  # sessions
    compactions: int = 5  # of 200 items; and half as many of a whole history
    large: int = 30_000  # items of 10 000 characters
    entries: int = 1_000_000


QUICK: Final = Sizes(
    appends=20,
    rounds=2,
    history=300,
    reads=1,
    sessions=120,
    many_sessions=240,
    pings=50,
    flood=300,
    starts=1,
    touched=10,
    compactions=1,
    large=40,
    entries=2000,
)


def percentile_99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)]


def start(name: Name, home: Path, sizes: Sizes) -> Figures:
    """From nothing to the first answer, on the same folder again and again."""
    times: list[float] = []
    memory: list[float] = []
    for _ in range(sizes.starts):
        began = time.perf_counter_ns()
        with running(name, home) as target:
            target.wire.call("protocol.ping")
            times.append((time.perf_counter_ns() - began) / 1e6)
            target.create()
            memory.append(target.memory_mib())
    return {"start": statistics.median(times), "memory_idle": statistics.median(memory)}


def ping(name: Name, home: Path, sizes: Sizes) -> Figures:
    """What does nothing."""
    with running(name, home) as target:
        wire = target.wire
        times = [wire.timed_us("protocol.ping") for _ in range(sizes.pings)]
        requests = [wire.encode("protocol.ping", {}) for _ in range(10 * sizes.pings)]
        rate = max(wire.windowed_per_s(requests, 128) for _ in range(3))
    return {"ping": statistics.median(times), "ping_pipelined": rate}


def flood(name: Name, home: Path, sizes: Sizes) -> Figures:
    """Requests without an answer, or with another than success and `overloaded`."""
    with running(name, home) as target:
        wire, session = target.wire, target.create()
        one = {"session_id": session, "items": items(1)}
        methods: list[tuple[str, dict[str, Any]]] = [("protocol.ping", {}), ("session.append", one)]
        requests = [wire.encode(*methods[number % 2]) for number in range(sizes.flood)]
        answers = wire.flood(requests)
        proper = sum(b'"result":' in frame or b'"overloaded"' in frame for frame in answers)
    return {"flood_lost": len(requests) - proper}


def append(name: Name, home: Path, sizes: Sizes) -> Figures:
    """One item a call, 100 a call, and one to each of 100 sessions at once."""
    with running(name, home) as target:
        wire, session = target.wire, target.create()
        for made in items(20):
            wire.timed_us("session.append", session_id=session, items=[made])
        times = [
            wire.timed_us("session.append", session_id=session, items=[made])
            for made in items(sizes.appends)
        ]
        hundreds = [
            wire.timed_us("session.append", session_id=session, items=items(100)) / 100
            for _ in range(10)
        ]
        sessions = [target.create() for _ in range(100)]
        rates: list[float] = []
        for _ in range(sizes.rounds):
            requests = [
                wire.encode("session.append", {"session_id": each, "items": [made]})
                for each, made in zip(sessions, MADE, strict=False)
            ]
            rates.append(wire.windowed_per_s(requests, 100))
    return {
        "append_median": statistics.median(times),
        "append_p99": percentile_99(times),
        "append_100_items": statistics.median(hundreds),
        "append_100_sessions": max(rates),
    }


def fsyncs(name: Name, home: Path, sizes: Sizes) -> Figures:
    """An fsync for how many appends, when 100 sessions append at once; with strace."""
    if shutil.which("strace") is None:
        print("scripts/bench: append_fsyncs is NOT MEASURED without strace", file=sys.stderr)
        return {}
    counts: list[int] = []
    for rounds in (0, sizes.rounds):
        place = home / f"{rounds}"
        place.mkdir()
        counted = place / "counted"
        watching = ("strace", "-f", "-o", str(counted), "-e", "trace=fsync,fdatasync")
        with running(name, place, watching) as target:
            sessions = [target.create() for _ in range(100)]
            for _ in range(rounds):
                params = [{"session_id": each, "items": items(1)} for each in sessions]
                requests = [target.wire.encode("session.append", each) for each in params]
                target.wire.windowed_per_s(requests, 100)
        calls = counted.read_text().splitlines()
        counts.append(sum("sync(" in line for line in calls))
    return {"append_fsyncs": (counts[1] - counts[0]) / (100 * sizes.rounds)}


def read(name: Name, home: Path, sizes: Sizes) -> Figures:
    """A history in one answer."""
    with running(name, home) as target:
        session = target.create()
        target.fill(session, sizes.history)
        request = target.get(session)
        times: list[float] = []
        for _ in range(sizes.reads):
            began = time.perf_counter_ns()
            frame = target.wire.ask(request)
            times.append((time.perf_counter_ns() - began) / 1e6)
            if frame.count(b'"type":"message"') != sizes.history:
                raise RuntimeError("the history did not come whole")
    return {"read_10k": statistics.median(times)}


def make_sessions(target: Target, count: int) -> None:
    requests = [target.wire.encode("session.create", {}) for _ in range(count)]
    target.wire.windowed_per_s(requests, 200)


def list_times(target: Target, sizes: Sizes) -> float:
    """Milliseconds for the first page."""
    times = [target.wire.timed_us("session.list", limit=100) for _ in range(3 * sizes.reads)]
    return statistics.median(times) / 1000


def listing(name: Name, home: Path, sizes: Sizes) -> Figures:
    """The first 100 sessions of many."""
    with running(name, home) as target:
        make_sessions(target, sizes.sessions)
        return {"list_10k": list_times(target, sizes)}


def listing_more(name: Name, home: Path, sizes: Sizes) -> Figures:
    """The same store as it grows."""
    with running(name, home) as target:
        make_sessions(target, sizes.sessions)
        few = list_times(target, sizes)
        make_sessions(target, sizes.many_sessions - sizes.sessions)
        return {"list_100k": list_times(target, sizes), "list_10k_before": few}


def compact(name: Name, home: Path, sizes: Sizes) -> Figures:
    """A new history compacted each time, offline: no model is waited for."""
    figures: Figures = {}
    with running(name, home) as target:
        for figure, count, rounds in (
            ("compact_200", min(200, sizes.history), sizes.compactions),
            ("compact_10k", sizes.history, 1 + sizes.compactions // 2),
        ):
            times: list[float] = []
            for _ in range(rounds + 1):
                session = target.create()
                target.fill(session, count)
                times.append(target.wire.timed_us("session.compact", session_id=session) / 1000)
            figures[figure] = statistics.median(times[1:])  # the first one loads the token table
    return figures


def touch(name: Name, home: Path, sizes: Sizes) -> Figures:
    """What 1 000 sessions with ten items each add to the memory of a daemon at rest."""
    with running(name, home) as target:
        first = target.create()
        target.fill(first, 10)
        before = target.memory_mib()
        for _ in range(sizes.touched):
            session = target.create()
            target.fill(session, 10)
        return {"memory_1000_sessions": target.memory_mib() - before}


@contextmanager
def probe(target: Target) -> Generator[Callable[[], float]]:
    """Another process pings all the time; the call ends that and gives the longest wait, in ms."""
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.probe", str(target.socket)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    def longest() -> float:
        told, _ = process.communicate("")
        return float(told)

    try:
        yield longest
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def beside(name: Name, home: Path, sizes: Sizes) -> Figures:
    """Appends to one session while another is compacted, by another connection."""
    at_rest: list[float] = []
    beside_one: list[float] = []
    with running(name, home) as target, another_wire(target) as other:
        session = target.create()
        request = {"session_id": session, "items": items(1)}
        target.wire.call("session.compact", session_id=_filled(target, sizes.history))
        with probe(target) as longest_ms:
            for _ in range(1 + sizes.compactions // 2):
                large = _filled(target, sizes.history)
                at_rest += [
                    target.wire.timed_us("session.append", **request) for _ in range(sizes.appends)
                ]
                compacting = other.encode("session.compact", {"session_id": large})
                other.socket.sendall(compacting)
                while not select.select([other.socket], [], [], 0)[0]:
                    beside_one.append(target.wire.timed_us("session.append", **request))
                other.answer()
                target.wire.ask(target.get(session))
                target.wire.call("session.list", limit=100)
            stall_ms = longest_ms()
    return {
        "append_beside": percentile_99(beside_one),
        "append_at_rest": percentile_99(at_rest),
        "stall": stall_ms,
    }


@contextmanager
def another_wire(target: Target) -> Generator[Wire]:
    """Another connection."""
    wire = Wire(target.socket)
    yield wire
    wire.close()


def _filled(target: Target, count: int) -> str:
    session = target.create()
    target.fill(session, count)
    return session


def large(name: Name, home: Path, sizes: Sizes) -> Figures:
    """What a compaction of 300 MB adds to the memory of the daemon, at its peak."""
    made = [item(number, 10_000) for number in range(100)]
    with running(name, home) as target:
        target.wire.call("session.compact", session_id=_filled(target, 200))
        session = target.create()
        target.fill(session, sizes.large, of=made)
        before = target.memory_mib()
        target.forget_peak()
        target.wire.call("session.compact", session_id=session)
        return {"memory_300_mb": target.memory_mib("VmHWM") - before}


def growth(name: Name, home: Path, sizes: Sizes) -> Figures:
    """An append to a session of a million entries, and to a new one."""
    with running(name, home) as target:
        long, short = target.create(), target.create()
        target.fill(long, sizes.entries, of=[{"role": "user", "content": "x"}])
        times: dict[str, list[float]] = {long: [], short: []}
        for made in items(sizes.appends):
            for session, taken in times.items():
                taken.append(
                    target.wire.timed_us("session.append", session_id=session, items=[made])
                )
    return {
        "append_long": statistics.median(times[long]),
        "append_short": statistics.median(times[short]),
    }


def disk(name: Name, home: Path, sizes: Sizes) -> Figures:
    """Bytes on disk for a byte appended, after 4 compactions and after 16."""
    figures: Figures = {}
    batch = max(200, sizes.history // 10)
    appended = 4 * sum(len(str(made)) for made in items(batch))
    with running(name, home) as target:
        session = target.create()
        for number in range(1, 17):
            target.fill(session, batch)
            target.wire.call("session.compact", session_id=session)
            if number in (4, 16):
                files = [file for file in target.data.rglob("*") if file.is_file()]
                used = sum(512 * file.stat().st_blocks for file in files)
                figures[f"disk_{number}"] = used / (appended * number / 4)
    return {"disk_growth": figures["disk_16"], "disk_before": figures["disk_4"]}
