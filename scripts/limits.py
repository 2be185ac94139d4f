"""What this machine takes for one thing at a time: the references of `scripts/bench` that are no
daemon. Each is a median, in microseconds.
"""

import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing import Process
from pathlib import Path

import aiosqlite
import anyio

BYTES = b"x" * 500


def timed(work: Callable[[], object]) -> float:
    """Microseconds."""
    start = time.perf_counter_ns()
    work()
    return (time.perf_counter_ns() - start) / 1000


def commit_us(folder: Path, count: int) -> float:
    """One row, committed with `synchronous=FULL`, as a program with aiosqlite would do it."""
    return anyio.run(_commit_us, folder, count)


async def _commit_us(folder: Path, count: int) -> float:
    times: list[float] = []
    async with aiosqlite.connect(folder / "commit.db", isolation_level=None) as database:
        await database.execute("PRAGMA journal_mode = WAL")
        await database.execute("PRAGMA synchronous = FULL")
        await database.execute("CREATE TABLE entry (place INTEGER PRIMARY KEY, item BLOB)")
        for _ in range(count):
            start = time.perf_counter_ns()
            await database.execute("BEGIN IMMEDIATE")
            await database.execute("INSERT INTO entry (item) VALUES (?)", (BYTES,))
            await database.execute("COMMIT")
            times.append((time.perf_counter_ns() - start) / 1000)
    return statistics.median(times)


def echo_us(count: int) -> float:
    """A line to another process over a Unix socket, and back."""
    ours, theirs = socket.socketpair()
    process = Process(target=_echo, args=(theirs, ours), daemon=True)
    process.start()
    theirs.close()
    line = b"x" * 60

    def there_and_back() -> None:
        ours.sendall(line)
        ours.recv(1 << 16)

    times = [timed(there_and_back) for _ in range(count)]
    ours.close()
    process.join()
    return statistics.median(times)


def _echo(connection: socket.socket, other: socket.socket) -> None:
    other.close()  # inherited: the end of the talk would not be seen
    while data := connection.recv(1 << 16):
        connection.sendall(data)


def synced_file_us(folder: Path, count: int) -> float:
    """A file made, written and synced."""

    paths = iter([folder / f"file-{number}" for number in range(count)])

    def write() -> None:
        with open(next(paths), "wb") as file:
            file.write(BYTES)
            file.flush()
            os.fsync(file.fileno())

    return statistics.median([timed(write) for _ in range(count)])
