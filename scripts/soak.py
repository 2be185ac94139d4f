"""Everything at once on one daemon, and whether it stays what it was.

    scripts/soak [--minutes N] [--operations N] [--json]

Authors append, compact (offline and by a model, `tests/provider_stub.py`), restore, rewind, fork,
export and delete, each in sessions of its own that never become long; listeners follow each session
by `seq` and come and go; somebody verifies everything again and again, somebody subscribes to all
and hardly reads, others connect, say half a request and leave. So all that can be seen has a bound:

rss_mib      resident memory of the daemon
descriptors  that it has open
threads      that it has
wal_mib      the write-ahead log
append_ms    99th percentile within a row of figures, as a client sees it
ping_ms      the same of `protocol.ping`, on a connection of its own

A figure is *flat* when its median over the last quarter is at most 1.25 times that over the second
quarter, plus an allowance (`ALLOWED`); latencies are judged in runs of ten minutes or more only.
What grows by design is told and not judged: `store_mib`, for the outcome of an operation and the
last event of a deleted session are kept for ever.

Counted and checked, whatever the run: every answer has the number of entries that it must have,
every listener got every event once, nothing but what was refused on purpose failed, and when all
clients have left the daemon has as many connections, descriptors and threads as before.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from recapd.protocol import messages as m
from recapd.protocol.client import Client, connect
from recapd.protocol.errors import CompactionError

ROOT: Final = Path(__file__).resolve().parent.parent
AUTHORS: Final = 4
ROUNDS: Final = 60  # changes of a session, until it is deleted
STINT: Final = 40  # events that a listener hears before it leaves and comes back
ROW_S: Final = 5.0
THINKING_S: Final = 0.03  # between two changes: it is to last, not to load
WAIT_S: Final = 60.0
JUDGED_LATENCY_S: Final = 600.0

ALLOWED: Final = {
    "rss_mib": 8.0,
    "descriptors": 6.0,
    "threads": 2.0,
    "wal_mib": 4.0,
    "append_ms": 5.0,
    "ping_ms": 5.0,
}
"""Beside a quarter more."""

FIGURES: Final = (*ALLOWED, "store_mib")
WARM_OPERATIONS: Final = 60

Row = dict[str, float]


@dataclass
class Run:
    """What is shared: the daemon, the counts, and when to stop."""

    daemon: "Daemon"
    until: Callable[[], bool]
    counts: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])
    append_ms: list[float] = field(default_factory=list[float])
    ping_ms: list[float] = field(default_factory=list[float])

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.faults.append(what)


class Daemon:
    """A daemon of its own, seen from outside."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.socket = folder / "s"
        self.data = folder / "data"
        self.pid = pid

    def figures(self) -> Row:
        status = Path(f"/proc/{self.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        sizes = [path.stat().st_size for path in self.data.rglob("*") if path.is_file()]
        wal = self.data / "store.db-wal"
        return {
            "rss_mib": int(fields["VmRSS"].split()[0]) / 1024,
            "descriptors": float(len(os.listdir(f"/proc/{self.pid}/fd"))),
            "threads": float(fields["Threads"]),
            "wal_mib": (wal.stat().st_size if wal.exists() else 0) / 2**20,
            "store_mib": sum(sizes) / 2**20,
        }

    @asynccontextmanager
    async def client(self) -> AsyncGenerator[Client]:
        async with connect(self.socket, name="soak") as client:
            yield client


@contextmanager
def started(folder: Path) -> Generator[Daemon]:
    """A daemon, and a model that answers at once for it to ask."""
    stub = subprocess.Popen(
        [sys.executable, "-m", "tests.provider_stub"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    ready, writing = os.pipe()
    daemon: subprocess.Popen[bytes] | None = None
    try:
        assert stub.stdout is not None
        port = int(stub.stdout.readline())
        (folder / "recapd.toml").write_text(
            f'[summarizers.chat]\nmodel = "m"\nbase_url = "http://127.0.0.1:{port}/answer/v1"\n'
        )
        daemon = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "recapd.daemon", "serve", "--log-level", "error"),
                *("--data-dir", str(folder / "data"), "--socket", str(folder / "s")),
                *("--ready-fd", str(writing)),
            ],
            pass_fds=[writing],
            env=os.environ | {"RECAPD_HOME": str(folder)},
        )
        os.close(writing)
        writing = -1
        with open(ready, "rb", closefd=False) as told:
            if told.read() != b"ready\n":
                raise RuntimeError("the daemon did not start")
        yield Daemon(folder, daemon.pid)
    finally:
        os.close(ready)
        if writing >= 0:
            os.close(writing)
        if daemon is not None:
            daemon.terminate()
            if daemon.wait(WAIT_S) != 0:
                print("the daemon did not end well", file=sys.stderr)
        stub.communicate()


# Who works.


class Author:
    """Works on one session after the other, and knows how many entries each must have."""

    def __init__(self, run: Run, name: str, chance: random.Random) -> None:
        self._run = run
        self._name = name
        self._chance = chance
        self._number = 0
        self._entries: dict[int, int] = {}  # by archived revision
        self._present: m.Session

    async def work(self, listen: Callable[[str], object]) -> None:
        async with self._run.daemon.client() as client:
            while not self._run.until():
                self._number += 1
                session_id = f"{self._name}.{self._number}"
                params = m.CreateParams(session_id=session_id, title="a soak")
                self._present = (await client.request("session.create", params)).session
                self._entries = {}
                listen(session_id)
                for _ in range(ROUNDS):
                    if self._run.until():
                        break
                    await self._change(client, session_id)
                    await anyio.sleep(THINKING_S)
                gone = await client.request("session.delete", m.DeleteParams(session_id=session_id))
                self._run.check(gone.deleted, "a session was gone before it was deleted")
                self._run.counts["sessions"] += 1

    async def _change(self, client: Client, session_id: str) -> None:
        kinds = ["append"] * 8 + ["compact", "chat", "export", "get"]
        if self._present.archived_revisions:
            kinds += ["restore", "rewind", "fork"]
        kind = self._chance.choice(kinds)
        before = self._present
        match kind:
            case "append":
                await self._append(client, session_id)
            case "compact" | "chat":
                await self._compact(client, session_id, "offline" if kind == "compact" else "chat")
            case "restore":
                revision = self._chance.choice(before.archived_revisions)
                params = m.RestoreParams(session_id=session_id, revision=revision)
                restored = await client.request("session.restore", params)
                self._replaced(restored.session)
                self._run.check(
                    self._present.entries == self._entries[revision], "a restore has other entries"
                )
            case "rewind":
                page = await client.request(
                    "session.get", m.GetParams(session_id=session_id, limit=3)
                )
                assert isinstance(page.entries, list)
                kept = len(page.entries)
                after = page.entries[-1].id if page.entries else 0
                params_ = m.RewindParams(session_id=session_id, after_entry_id=after)
                self._replaced((await client.request("session.rewind", params_)).session)
                self._run.check(self._present.entries == kept, "a rewind has other entries")
            case "fork":
                await self._fork(client, session_id)
            case "export":
                text = "".join([chunk async for chunk in client.export(session_id)])
                self._run.check(text.count("\n") == before.entries, "an export has other entries")
            case _:
                count = len([entry.id async for entry in client.pages(session_id)])
                self._run.check(count == before.entries, "a history has other entries")
        self._run.counts[kind] += 1
        self._run.counts["operations"] += 1

    async def _append(self, client: Client, session_id: str) -> None:
        items = [
            b'{"role":"user","content":"%b"}' % (b"words to soak " * self._chance.randint(1, 60))
            for _ in range(self._chance.choice([1, 1, 1, 20]))
        ]
        begun_s = time.perf_counter()
        async for appended in client.append_items(session_id, items):
            self._run.append_ms.append(1000 * (time.perf_counter() - begun_s))
            expected = self._present.entries + len(items)
            self._run.check(appended.session.entries == expected, "an append has other entries")
            self._present = appended.session

    async def _compact(self, client: Client, session_id: str, summarizer: m.Summarizer) -> None:
        params = m.CompactParams(session_id=session_id, summarizer=summarizer)
        try:
            result = await client.request("session.compact", params)
        except CompactionError:  # there is nothing to compact, or a short history became no shorter
            self._run.counts["compactions refused"] += 1
            return
        self._replaced(result.session)
        self._run.check(self._present.entries == result.entries_after, "a compaction has others")

    async def _fork(self, client: Client, session_id: str) -> None:
        revision = self._chance.choice(self._present.archived_revisions)
        params = m.ForkParams(
            session_id=session_id, revision=revision, new_session_id=f"{session_id}.fork"
        )
        forked = (await client.request("session.fork", params)).session
        self._run.check(forked.entries == self._entries[revision], "a fork has other entries")
        await client.request("session.delete", m.DeleteParams(session_id=forked.session_id))

    def _replaced(self, session: m.Session) -> None:
        if session.revision != self._present.revision:
            self._entries[self._present.revision] = self._present.entries
        self._present = session


async def listen(run: Run, session_id: str) -> None:
    """Every event of one session until it is deleted, in stints, each behind the last event."""
    seq = 0
    while True:
        async with (
            run.daemon.client() as client,
            client.subscribe(session_id, since=seq or "start") as notices,
        ):
            heard = 0
            async for notice in notices:
                if notice.seq is None:
                    continue
                run.check(notice.seq == seq + 1, "an event is missing, or came twice")
                seq = notice.seq
                run.counts["events"] += 1
                if notice.method == "session.deleted":
                    return
                heard += 1
                if heard == STINT:
                    break


async def ping(run: Run) -> None:
    async with run.daemon.client() as client:
        while not run.until():
            begun_s = time.perf_counter()
            await client.request("protocol.ping")
            run.ping_ms.append(1000 * (time.perf_counter() - begun_s))
            run.counts["pings"] += 1
            await anyio.sleep(0.02)


async def verify(run: Run) -> None:
    async with run.daemon.client() as client:
        while not run.until():
            result = await client.request("session.verify", m.VerifyParams())
            run.check(result.faults_total == 0, "verify found a fault")
            run.counts["verified"] += result.checked
            await anyio.sleep(0.5)


async def hardly_read(run: Run) -> None:
    """Subscribe to all events, and take a few bytes now and then."""
    asked = m.SubscribeParams(since="start")
    request = {"jsonrpc": "2.0", "id": 1, "method": "session.subscribe", "params": asked}
    while not run.until():
        async with await anyio.connect_unix(run.daemon.socket) as stream:
            await stream.send(msgspec.json.encode(request) + b"\n")
            for _ in range(50):
                await stream.receive(64)
                await anyio.sleep(0.02)
                if run.until():
                    break
        run.counts["slow readers"] += 1


async def come_and_go(run: Run) -> None:
    half = b'{"jsonrpc":"2.0","id":1,"method":"session.li'
    while not run.until():
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(run.daemon.socket))
            peer.send(half)
        async with run.daemon.client() as client:
            await client.request("session.list")
        run.counts["came and went"] += 1
        await anyio.sleep(0.05)


# The whole.


async def soak(run: Run, seed: int) -> list[Row]:
    """Rows of figures."""
    rows: list[Row] = []
    begun_s = time.monotonic()

    async def measure() -> None:
        while not run.until():
            await anyio.sleep(ROW_S)
            rows.append({"minute": (time.monotonic() - begun_s) / 60, **run.daemon.figures()})
            for name, values in (("append_ms", run.append_ms), ("ping_ms", run.ping_ms)):
                if values:
                    rows[-1][name] = sorted(values)[int(len(values) * 0.99)]
                    values.clear()

    def follow(session_id: str) -> None:
        others.start_soon(listen, run, session_id)

    async with anyio.create_task_group() as others, anyio.create_task_group() as tasks:
        for number in range(AUTHORS):
            author = Author(run, f"author-{seed}-{number}", random.Random(f"{seed} {number}"))
            tasks.start_soon(author.work, follow)
        for task in (ping, verify, hardly_read, come_and_go):
            tasks.start_soon(task, run)
        others.start_soon(measure)
    return rows


async def measured(folder: Path, minutes: float, operations: int | None) -> dict[str, Any]:
    """Run it, and say what came of it."""
    with started(folder) as daemon:
        async with daemon.client() as client:
            # Everything was done once before figures are taken: what is loaded by then stays.
            warm = Run(daemon, lambda: warm.counts["operations"] >= WARM_OPERATIONS)
            await soak(warm, 6)
            before = await _at_rest(daemon, client)
            end_s = time.monotonic() + 60 * minutes
            run = Run(
                daemon,
                (lambda: time.monotonic() >= end_s)
                if operations is None
                else (lambda: run.counts["operations"] >= operations),
            )
            rows = await soak(run, 7)
            after = await _at_rest(daemon, client)
            run.check(after["descriptors"] <= before["descriptors"], "descriptors were left open")
            # anyio ends an idle thread only when another is asked for
            threads_max = before["threads"] + ALLOWED["threads"]
            run.check(after["threads"] <= threads_max, "threads were left")
            listed = await client.request("session.list")
            run.check(listed.sessions == [], "sessions were left")
    quarters = [rows[len(rows) * n // 4 : len(rows) * (n + 1) // 4] for n in range(4)]
    figures: dict[str, Any] = {}
    for name in FIGURES:
        medians = [_median(quarter, name) for quarter in quarters]
        judged = name in ALLOWED and (not name.endswith("_ms") or 60 * minutes >= JUDGED_LATENCY_S)
        flat = None
        if operations is None and judged and None not in medians:
            flat = medians[3] <= 1.25 * medians[1] + ALLOWED[name]
        figures[name] = {"quarters": medians, "flat": flat}
    grown_bytes = (after["store_mib"] - before["store_mib"]) * 2**20
    return {
        "minutes": minutes if operations is None else None,
        "counts": dict(sorted(run.counts.items())),
        "faults": dict(Counter(warm.faults + run.faults)),
        "figures": figures,
        "store_bytes_per_operation": round(grown_bytes / max(run.counts["operations"], 1)),
    }


async def _at_rest(daemon: Daemon, client: Client) -> Row:
    """The figures once all other clients have left."""
    with anyio.fail_after(WAIT_S):
        while (await client.request("server.info")).connections > 1:
            pass  # each request gives the daemon a turn
    return daemon.figures()


def _median(rows: list[Row], name: str) -> Any:
    values = [row[name] for row in rows if name in row]
    return round(statistics.median(values), 2) if values else None


def show(report: dict[str, Any]) -> None:
    print(f"{'':<14}{'1st':>10}{'2nd':>10}{'3rd':>10}{'4th':>10}   medians of the quarters")
    for name, figure in report["figures"].items():
        cells = "".join(f"{'-' if one is None else one:>10}" for one in figure["quarters"])
        verdict = {True: "flat", False: "NOT FLAT", None: "not judged"}[figure["flat"]]
        print(f"{name:<14}{cells}   {verdict}")
    print(f"flat: the 4th is at most 1.25 times the 2nd, plus {ALLOWED}")
    print("counts: " + ", ".join(f"{name} {count}" for name, count in report["counts"].items()))
    print(f"the store grew by {report['store_bytes_per_operation']} bytes an operation")
    for fault, count in report["faults"].items():
        print(f"FAULT, {count} times: {fault}")
    print("no fault" if not report["faults"] else "faults were found")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--operations", type=int, help="stop after so many, and judge counts only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recapd-") as folder:
        report = anyio.run(measured, Path(folder), options.minutes, options.operations)
    if options.json:
        json.dump({"soak": report}, sys.stdout)
        print()
    else:
        show(report)
    flat = all(figure["flat"] is not False for figure in report["figures"].values())
    sys.exit(0 if flat and not report["faults"] else 1)


if __name__ == "__main__":
    main()
