"""The least daemon that does recapd's job durably: what Python and this disk allow.

    python -m scripts.floor SOCKET FOLDER

A measure for `scripts/bench`, of no other use: it believes every byte it is sent, bounds nothing,
asks nobody who he is and recovers from nothing. What it does not leave out is what costs: each
append is synced before its answer (all that wait share one commit), and a compaction writes,
syncs and re-reads the old history before the new one takes its place.
"""

import asyncio
import hashlib
import os
import sqlite3
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from threading import Condition, Thread
from typing import Any, Final, cast

import msgspec

Reply = tuple[asyncio.WriteTransport, bytes]
Work = Callable[[sqlite3.Connection], Any]

SCHEMA: Final = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS session (id TEXT PRIMARY KEY, changed INTEGER, base INTEGER);
CREATE INDEX IF NOT EXISTS session_changed ON session (changed);
CREATE TABLE IF NOT EXISTS entry (place INTEGER PRIMARY KEY, item BLOB);
"""
SUMMARY: Final = b'{"role":"user","content":"What was here before is in the archive."}'


class Request(msgspec.Struct):
    method: str
    id: int
    params: msgspec.Raw


class Params(msgspec.Struct):
    session_id: str = ""
    items: list[msgspec.Raw] = []
    limit: int = 100


class Session(msgspec.Struct):
    """The places of its entries are `key << 32` and up; those before `base` are archived."""

    key: int
    base: int
    end: int


read_request = msgspec.json.Decoder(Request).decode
read_params = msgspec.json.Decoder(Params).decode


class Committer(Thread):
    """Everything that waits goes into one transaction; the answers leave after it."""

    def __init__(self, folder: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._loop = loop
        self._condition = Condition()
        self._waiting: list[tuple[Work, Reply]] = []

    def put(self, work: Work, reply: Reply) -> None:
        with self._condition:
            self._waiting.append((work, reply))
            self._condition.notify()

    def run(self) -> None:
        database = opened(self._folder)
        while True:
            with self._condition:
                while not self._waiting:
                    self._condition.wait()
                group, self._waiting = self._waiting, []
            database.execute("BEGIN IMMEDIATE")
            for work, _ in group:
                work(database)
            database.execute("COMMIT")
            self._loop.call_soon_threadsafe(send, [reply for _, reply in group])


def opened(folder: str) -> sqlite3.Connection:
    database = sqlite3.connect(
        os.path.join(folder, "floor.db"), isolation_level=None, check_same_thread=False
    )
    database.executescript(SCHEMA)
    return database


def send(replies: list[Reply]) -> None:
    together: dict[asyncio.WriteTransport, list[bytes]] = {}
    for transport, frame in replies:
        together.setdefault(transport, []).append(frame)
    for transport, frames in together.items():
        transport.write(b"".join(frames))


def answer(request: int, result: bytes) -> bytes:
    return b'{"jsonrpc":"2.0","id":%d,"result":%b}\n' % (request, result)


class Floor:
    """All sessions of a folder."""

    def __init__(self, folder: str, loop: asyncio.AbstractEventLoop) -> None:
        self._folder = folder
        self._loop = loop
        self._sessions: dict[str, Session] = {}
        self._database = opened(folder)
        last = "SELECT coalesce(max(place) + 1, :base) FROM entry WHERE place < (:key + 1) << 32"
        for key, name, base in self._database.execute("SELECT rowid, id, base FROM session"):
            (end,) = self._database.execute(last, {"base": base, "key": key}).fetchone()
            self._sessions[name] = Session(key, base, max(base, end))
        self._changes = len(self._sessions)
        self._reader = ThreadPoolExecutor(1)
        self._committer = Committer(folder, loop)
        self._committer.start()

    def handle(self, transport: asyncio.WriteTransport, line: bytes) -> bytes:
        """The answer, or nothing where it comes later."""
        request = read_request(line)
        if request.method == "protocol.ping":
            return answer(request.id, b"{}")
        params = read_params(request.params)
        match request.method:
            case "session.append":
                self._append(transport, request.id, params)
            case "session.create":
                self._create(transport, request.id)
            case "session.get":
                self._reader.submit(self._get, transport, request.id, params.session_id)
            case "session.list":
                self._reader.submit(self._list, transport, request.id, params.limit)
            case "session.compact":
                self._reader.submit(self._compact, transport, request.id, params.session_id)
            case _:
                raise ValueError(request.method)
        return b""

    def _create(self, transport: asyncio.WriteTransport, request: int) -> None:
        key = len(self._sessions) + 1
        name = f"floor-{key}"
        self._sessions[name] = Session(key, key << 32, key << 32)
        self._changes += 1
        row = (name, self._changes, key << 32)

        def work(database: sqlite3.Connection) -> None:
            database.execute("INSERT INTO session VALUES (?, ?, ?)", row)

        self._committer.put(
            work, (transport, answer(request, b'{"session_id":"%b"}' % name.encode()))
        )

    def _append(self, transport: asyncio.WriteTransport, request: int, params: Params) -> None:
        session = self._sessions[params.session_id]
        first = session.end
        session.end += len(params.items)
        rows = [(first + number, bytes(item)) for number, item in enumerate(params.items)]

        def work(database: sqlite3.Connection) -> None:
            database.executemany("INSERT INTO entry VALUES (?, ?)", rows)

        self._committer.put(work, (transport, answer(request, b'{"entry":%d}' % first)))

    def _items(self, session: Session, end: int) -> bytes:
        query = "SELECT item FROM entry WHERE place >= ? AND place < ? ORDER BY place"
        return b",".join([item for (item,) in self._database.execute(query, (session.base, end))])

    def _later(self, transport: asyncio.WriteTransport, frame: bytes) -> None:
        self._loop.call_soon_threadsafe(transport.write, frame)

    def _get(self, transport: asyncio.WriteTransport, request: int, name: str) -> None:
        session = self._sessions[name]
        items = self._items(session, session.end)
        self._later(transport, answer(request, b'{"items":[%b]}' % items))

    def _list(self, transport: asyncio.WriteTransport, request: int, limit: int) -> None:
        query = "SELECT id, changed FROM session ORDER BY changed DESC LIMIT ?"
        rows = [{"id": name, "changed": at} for name, at in self._database.execute(query, (limit,))]
        self._later(transport, answer(request, msgspec.json.encode({"sessions": rows})))

    def _compact(self, transport: asyncio.WriteTransport, request: int, name: str) -> None:
        session = self._sessions[name]
        self._archive(f"{name}.{session.end}", self._items(session, session.end))
        place = session.end
        session.base = place
        session.end += 1

        def work(database: sqlite3.Connection) -> None:
            database.execute("INSERT INTO entry VALUES (?, ?)", (place, SUMMARY))
            database.execute("UPDATE session SET base = ? WHERE id = ?", (place, name))

        told = b'{"jsonrpc":"2.0","method":"session.compacted","params":{"session_id":"%b"}}\n'
        frames = told % name.encode() + answer(request, b"{}")
        self._committer.put(work, (transport, frames))

    def _archive(self, name: str, items: bytes) -> None:
        path = os.path.join(self._folder, name)
        with open(path + ".new", "wb") as file:
            file.write(hashlib.sha256(items).hexdigest().encode() + b"\n" + items)
            file.flush()
            os.fsync(file.fileno())
        with open(path + ".new", "rb") as file:
            digest = file.readline().strip().decode()
            if hashlib.sha256(file.read()).hexdigest() != digest:
                raise OSError("the archive is not what was written")
        os.rename(path + ".new", path)
        folder = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


class Lines(asyncio.Protocol):
    """A connection: a line is a request."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's has no such base

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if b"\n" not in data:
            return
        *lines, rest = b"".join(self._parts).split(b"\n")
        self._parts = [rest]
        answers = b"".join([self._floor.handle(self._transport, line) for line in lines])
        if answers:
            self._transport.write(answers)


async def serve(socket: str, folder: str) -> None:
    """Serve until killed."""
    os.makedirs(folder, exist_ok=True)
    loop = asyncio.get_running_loop()
    floor = Floor(folder, loop)
    server = await loop.create_unix_server(lambda: Lines(floor), socket, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    if find_spec("uvloop") is None:
        asyncio.run(serve(*sys.argv[1:]))
    else:  # as recapd does
        import uvloop

        uvloop.run(serve(*sys.argv[1:]))
