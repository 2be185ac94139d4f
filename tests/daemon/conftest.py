"""A daemon within the test, and connections to it that send bytes and read frames."""

import contextlib
import gc
import itertools
import json
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.abc
import pytest

from recapd.daemon.compaction.summarise.base import Source, Summary
from recapd.daemon.compaction.summarise.offline import OfflineSummariser
from recapd.daemon.compactions import Compactions
from recapd.daemon.config import Settings, resolve
from recapd.daemon.lifecycle import ExitCode, serve
from recapd.protocol.errors import from_wire

Message = dict[str, Any]

WAIT_S = 60
"""For anything that should happen at once; the machine may have other things to do."""


class Peer:
    """One connection. Answers are matched by id, notifications are kept in order.

    Nothing of the product is used to write or read, only Python's own JSON.
    """

    def __init__(
        self,
        stream: anyio.abc.SocketStream,
        framing: Literal["lines", "content-length"] = "lines",
    ) -> None:
        self.stream = stream
        self.notices: deque[Message] = deque()
        self._framing = framing
        self._answers: dict[object, Message] = {}
        self._buffer = bytearray()
        self._ids = itertools.count(1)

    # Bytes and frames.

    async def send(self, data: bytes) -> None:
        with anyio.fail_after(WAIT_S):
            await self.stream.send(data)

    async def say(self, *messages: object) -> None:
        """Send each as a frame of its own, all with one write."""
        await self.send(b"".join(self._encode(json.dumps(one).encode()) for one in messages))

    def _encode(self, body: bytes) -> bytes:
        if self._framing == "lines":
            return body + b"\n"
        return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)

    async def frame(self) -> bytes:
        """The next frame. Raises EndOfStream."""
        with anyio.fail_after(WAIT_S):
            if self._framing == "lines":
                return await self._until(b"\n")
            header = await self._until(b"\r\n\r\n")
            name, _, length = header.partition(b": ")
            assert name == b"Content-Length"
            while len(self._buffer) < int(length):
                self._buffer += await self.stream.receive(1 << 18)
            frame = bytes(self._buffer[: int(length)])
            del self._buffer[: int(length)]
            return frame

    async def _until(self, end: bytes) -> bytes:
        seen = 0
        while (found := self._buffer.find(end, seen)) < 0:
            seen = max(0, len(self._buffer) - len(end) + 1)
            self._buffer += await self.stream.receive(1 << 18)
        piece = bytes(self._buffer[:found])
        del self._buffer[: found + len(end)]
        return piece

    async def message(self) -> Any:
        """The next frame, whatever it is, as JSON."""
        return json.loads(await self.frame())

    async def rest(self) -> list[Any]:
        """Say that no more is sent; everything that still comes until the daemon closes."""
        with contextlib.suppress(anyio.BrokenResourceError, OSError):
            await self.stream.send_eof()
        return await self.until_closed()

    async def until_closed(self) -> list[Any]:
        """Everything that still comes until the daemon closes."""
        found: list[Any] = []
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                found.append(await self.message())
        assert not self._buffer, "half a frame at the end of the stream"
        return found

    async def until_closed_abruptly(self) -> list[Any]:
        """The same where the end may fall into a frame."""
        found: list[Any] = []
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                found.append(await self.message())
        return found

    # Requests.

    async def ask(self, method: str, /, **params: object) -> int:
        """Send a request; its id."""
        id = next(self._ids)
        await self.say(request(id, method, **params))
        return id

    async def answer(self, id: object) -> Message:
        """The answer to a request, as it came."""
        while id not in self._answers:
            await self._sort()
        return self._answers.pop(id)

    async def result(self, id: object) -> Any:
        """The result of a request. Raises RpcError."""
        answer = await self.answer(id)
        if "error" in answer:
            raise from_wire(answer["error"])
        return answer["result"]

    async def call(self, method: str, /, **params: object) -> Any:
        """The result of a new request. Raises RpcError."""
        return await self.result(await self.ask(method, **params))

    async def until(self, holds: Callable[[Any], bool], method: str, /, **params: object) -> Any:
        """The first result of which this holds; each request gives the daemon a turn."""
        with anyio.fail_after(WAIT_S):
            while True:
                result = await self.call(method, **params)
                if holds(result):
                    return result

    async def notice(self, method: str | None = None) -> Message:
        """The next notification (with this method, if given), as it came; others stay."""
        while True:
            for notice in self.notices:
                if method is None or method == notice["method"]:
                    self.notices.remove(notice)
                    return notice
            await self._sort()

    async def _sort(self) -> None:
        message = await self.message()
        assert not isinstance(message, list), "an answer to a batch, which nobody waits for"
        if "id" in message:
            assert message["id"] not in self._answers, f"two answers to {message['id']}"
            self._answers[message["id"]] = message
        else:
            self.notices.append(message)

    # What many tests do.

    async def items(self, session_id: str, **params: object) -> list[Any]:
        """The items of a history, by pages."""
        return [entry["item"] for entry in await self.entries(session_id, **params)]

    async def entries(self, session_id: str, **params: object) -> list[Message]:
        """The entries of a history, by pages."""
        entries: list[Message] = []
        cursor: str | None = None
        while True:
            page = await self.call("session.get", session_id=session_id, cursor=cursor, **params)
            entries += page["entries"]
            cursor = page["next_cursor"]
            if cursor is None:
                return entries


def request(id: object, method: str, /, **params: object) -> Message:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


def notification(method: str, /, **params: object) -> Message:
    return {"jsonrpc": "2.0", "method": method, "params": params}


EMPTY: Message = {}
"""The smallest item."""


def user(text: str) -> Message:
    """An item: a message of the user."""
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Daemon:
    """A daemon that runs in the test's own event loop."""

    settings: Settings
    stopped: anyio.Event
    exit_codes: list[ExitCode]

    @asynccontextmanager
    async def connect(
        self, framing: Literal["lines", "content-length"] = "lines"
    ) -> AsyncGenerator[Peer]:
        """A new connection, closed at the end of the block."""
        async with await anyio.connect_unix(self.settings.socket) as stream:
            yield Peer(stream, framing)

    async def exit_code(self) -> ExitCode:
        """How it ended, once it has."""
        with anyio.fail_after(WAIT_S):
            await self.stopped.wait()
        return self.exit_codes[0]


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Generator[None]:
    """What a daemon sets for its whole process is not for the tests behind this one."""
    mask, threshold = os.umask(0o022), gc.get_threshold()
    yield
    os.umask(mask)
    gc.set_threshold(*threshold)
    gc.unfreeze()


@pytest.fixture
def folder() -> Generator[Path]:
    """A new folder with a short name, for the path of a socket has 107 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="recapd-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(folder: Path) -> Callable[..., AbstractAsyncContextManager[Daemon]]:
    """Runs a daemon with these settings as long as a block runs; each time on the same store."""

    @asynccontextmanager
    async def start(
        *,
        now_ms: Callable[[], int] | None = None,
        elapsed_ms: Callable[[], int] | None = None,
        **settings: object,
    ) -> AsyncGenerator[Daemon]:
        resolved = resolve(
            {"data_dir": folder / "data", "socket": folder / "rpc.sock", **settings}, {}
        )
        ready = anyio.Event()
        daemon = Daemon(resolved, anyio.Event(), [])

        async def run() -> None:
            try:
                clocks: Message = {"now_ms": now_ms, "elapsed_ms": elapsed_ms}
                clocks = {name: clock for name, clock in clocks.items() if clock is not None}
                daemon.exit_codes.append(await serve(resolved, ready=ready.set, **clocks))
            finally:
                daemon.stopped.set()
                ready.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            with anyio.fail_after(WAIT_S):
                await ready.wait()
                assert daemon.exit_codes == [], "the daemon did not start"
            yield daemon
            with contextlib.suppress(OSError, anyio.EndOfStream, anyio.BrokenResourceError):
                async with daemon.connect() as peer:  # unless it is stopping already
                    await peer.call("server.shutdown", mode="now")
            assert await daemon.exit_code() is ExitCode.STOPPED
        assert not resolved.socket.exists()

    return start


@pytest.fixture
async def daemon(
    start: Callable[..., AbstractAsyncContextManager[Daemon]],
) -> AsyncGenerator[Daemon]:
    """A daemon with the default settings."""
    async with start() as daemon:
        yield daemon


@pytest.fixture
async def peer(daemon: Daemon) -> AsyncGenerator[Peer]:
    """A connection to it."""
    async with daemon.connect() as peer:
        yield peer


@pytest.fixture
def incidents() -> list[str]:
    """How many errors a test means to have logged: it appends to this, see `_no_errors_logged`."""
    return []


@pytest.fixture(autouse=True)
def _no_errors_logged(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, incidents: list[str]
) -> Generator[None]:
    """A daemon logs an error only where a test has provoked one, and says so by `incidents`."""
    caplog.set_level(logging.DEBUG, logger="recapd")
    yield
    logged = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= 40]
    if request.node.get_closest_marker("xfail") is None:
        assert len(logged) == len(incidents), logged


class Gate:
    """Holds up the offline summariser until `open` is called."""

    def __init__(self) -> None:
        self.entered = 0
        self.left = 0
        self.fails_with: Exception | None = None
        self._changed = anyio.Event()
        self._open = anyio.Event()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open = anyio.Event()

    async def reached(self, times: int = 1) -> None:
        """Until the summariser was called so often."""
        with anyio.fail_after(WAIT_S):
            while self.entered < times:
                await self._changed.wait()

    async def pass_through(self) -> None:
        self.entered += 1
        self._changed.set()
        self._changed = anyio.Event()
        try:
            await self._open.wait()
            if self.fails_with is not None:
                raise self.fails_with
        finally:
            self.left += 1
            self._changed.set()
            self._changed = anyio.Event()


@pytest.fixture
async def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Holds up each summary, as a slow model would."""
    gate = Gate()
    summarise = OfflineSummariser.__call__

    async def wait(self: OfflineSummariser, source: Source) -> Summary:
        await gate.pass_through()
        return await summarise(self, source)

    monkeypatch.setattr(OfflineSummariser, "__call__", wait)
    return gate


@dataclass
class HeldCommit:
    """Holds up the step of a compaction that cannot be cancelled, until `go` is set."""

    reached: anyio.Event = field(default_factory=anyio.Event)
    go: anyio.Event = field(default_factory=anyio.Event)


@pytest.fixture
def hold_commits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], HeldCommit]:
    """Holds up the commit of each compaction from the call on."""

    def hold() -> HeldCommit:
        held = HeldCommit()
        commit: Any = getattr(Compactions, "_commit")  # noqa: B009

        async def wait(self: Compactions, *arguments: object) -> object:
            held.reached.set()
            await held.go.wait()
            return await commit(self, *arguments)

        monkeypatch.setattr(Compactions, "_commit", wait)
        return held

    return hold
