"""Peers that send anything (docs/durability.md): each request gets its one answer, the others are
served, and the daemon stays as small as it was.
"""

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc
import msgspec
import pytest
from tests.e2e.conftest import WAIT_S, Process, Serve

from recapd.protocol import messages as m
from recapd.protocol.client import Client
from recapd.protocol.examples import EXAMPLES
from recapd.protocol.items import is_array, is_object

LONG = os.environ.get("RECAPD_LONG") == "1"
FRAMES = 1_000_000 if LONG else 20_000

RSS_GROWTH_BYTES: Final = 150 << 20
"""What a daemon may take on top of what it had, whatever its peers send."""

_AT_ONCE: Final = 40  # below what may be in flight on a connection
_TURN: Final = 2000  # frames on one connection
_NOT_SENT: Final = {"server.shutdown"}
_PIECES: Final = (
    *(b"\0", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"{", b"}", b"[", b"]", b'"', b"\\"),
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"1" * 400, b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"//"),
    *(b'"id":1,', b'"id":null,', b'"jsonrpc":"1.0",', b",", b":", b" ", b"\t", b"C", b"[" * 200),
)
_VALUES: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, 1.5, 2**53, 2**64, -(2**70), "", "a", "x" * 5000, "\0", "\u2028"),
    *([], {}, [[]], [None], {"": {}}, ["a"] * 50, {"a": {"b": {"c": [1, {"d": 2}]}}}),
)


def seeds() -> list[dict[str, Any]]:
    """A valid request of each method."""
    found: list[dict[str, Any]] = []
    for method, (params, _) in EXAMPLES.items():
        if method not in _NOT_SENT:
            plain = json.loads(msgspec.json.encode(params))
            plain.pop("wait_ms", None)  # an answer may take as long as that asks for
            found.append({"jsonrpc": "2.0", "method": method, "params": plain})
    return found


class Mutator:
    """Makes frames: some valid, most not quite."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seeds = seeds()
        self._count = 0

    def frame(self) -> bytes:
        """A frame without its line break."""
        one = self._random
        if one.random() < 0.15:
            value: Any = [self._request() for _ in range(one.randrange(5))]
        else:
            value = self._request()
        data = json.dumps(value, ensure_ascii=one.random() < 0.5).encode("utf-8", "surrogatepass")
        for _ in range(one.choice((0, 0, 0, 1, 1, 2, 5))):
            data = self._damage(data)
        return data.replace(b"\n", b" ")

    def clear_frame(self) -> bytes:
        """One of which it is clear what is owed to it."""
        while True:
            frame = self.frame()
            with suppress(Unclear):
                owed(frame)
                return frame

    def _request(self) -> Any:
        one = self._random
        self._count += 1
        request = copy.deepcopy(one.choice(self._seeds))
        if one.random() < 0.9:
            request["id"] = f"{self._count}" if one.random() < 0.5 else self._count
        for _ in range(one.choice((0, 0, 1, 1, 2))):
            self._change(request)
        return request if one.random() < 0.97 else self._value()

    def _value(self) -> Any:
        return copy.deepcopy(self._random.choice(_VALUES))

    def _change(self, value: Any) -> None:
        """Put something else somewhere into an object, or take something out."""
        one = self._random
        while True:
            keys: list[Any] = [*value] if is_object(value) else [*range(len(value))]
            if not keys:
                return
            key = one.choice(keys)
            inner: Any = value[key]
            if (is_object(inner) or is_array(inner)) and inner and one.random() < 0.7:
                value = inner
                continue
            if one.random() < 0.2:
                del value[key]
            elif key == "method":
                value[key] = one.choice(("", "session", "rpc.x", "session.get", "$/cancelRequest"))
            elif key != "wait_ms":
                value[key] = self._value()
            return

    def _damage(self, data: bytes) -> bytes:
        one = self._random
        start = one.randrange(len(data) + 1)
        stop = min(len(data), start + one.randrange(1, 12))
        match one.randrange(5):
            case 0:
                return data[:start] + data[stop:]
            case 1:
                return data[:start] + one.choice(_PIECES) + data[start:]
            case 2:
                return data[:start] + data[start:stop] * 3 + data[stop:]
            case 3:
                return data[:start] + one.randbytes(stop - start) + data[stop:]
            case _:
                return data[:start]


class Unclear(Exception):
    """What is owed to a frame is not for this reader to say."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise Unclear
    return dict(pairs)


def _no_number(name: str) -> None:
    raise ValueError(name)


def owed(frame: bytes) -> Counter[str | None]:
    """The ids of the answers to a frame, as JSON; None among them: an error without an id.

    Raises Unclear where there may be more than one opinion.
    """
    if not frame.strip(b" \t\r"):
        return Counter()
    if frame.count(b"[" * 50):  # too deep, if it is JSON at all
        raise Unclear
    try:
        value = json.loads(frame.decode(), object_pairs_hook=_object, parse_constant=_no_number)
        json.dumps(value, ensure_ascii=False).encode()  # not half of a surrogate pair
    except ValueError:
        return Counter([None])
    entries: Sequence[Any] = value if is_array(value) and value else [value]
    ids: list[str | None] = []
    for entry in entries:
        ids += _owed(entry)
    return Counter(ids)


def _owed(entry: Any) -> Iterator[str | None]:
    if not is_object(entry):
        yield None
    elif "id" in entry:
        id: Any = entry["id"]
        named = isinstance(id, str | int) and not isinstance(id, bool)
        yield json.dumps(id) if named else None
    elif entry.get("jsonrpc") != "2.0" or not isinstance(entry.get("method"), str):
        yield None


class Attacker:
    """A connection that sends frames and counts the answers."""

    def __init__(self, stream: anyio.abc.SocketStream, *, headers: bool) -> None:
        self._stream = stream
        self._headers = headers  # the framing of the Language Server Protocol
        self._buffer = b""

    def _encode(self, frame: bytes) -> bytes:
        if self._headers:
            return b"Content-Length: %d\r\n\r\n%b" % (len(frame), frame)
        return frame + b"\n"

    async def _answers(self) -> Counter[str | None]:
        """The ids that the next piece answers. Raises EndOfStream."""
        self._buffer += await self._stream.receive(1 << 18)
        messages: list[bytes] = []
        if self._headers:
            while b"\r\n\r\n" in self._buffer:
                header, rest = self._buffer.split(b"\r\n\r\n", 1)
                length = int(header.removeprefix(b"Content-Length: "))
                if len(rest) < length:
                    break
                messages.append(rest[:length])
                self._buffer = rest[length:]
        else:
            *messages, self._buffer = self._buffer.split(b"\n")
        return Counter(id for message in messages for id in _answered(json.loads(message)))

    async def exchange(self, frames: list[bytes], end: str) -> None:
        """Send frames, and a ping whose answer says that all before it were answered."""
        ping = json.dumps({"jsonrpc": "2.0", "id": end, "method": "protocol.ping"}).encode()
        wanted: Counter[str | None] = Counter([json.dumps(end)])
        for frame in frames:
            wanted += owed(frame) if not self._headers or frame.strip() else Counter([None])
        got: Counter[str | None] = Counter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stream.send, b"".join(map(self._encode, [*frames, ping])))
            with anyio.move_on_after(WAIT_S):
                while json.dumps(end) not in got or got.total() < wanted.total():
                    got += await self._answers()
        assert got == wanted, (wanted - got, got - wanted)

    async def leave(self) -> None:
        """No answer comes that is not owed."""
        await self._stream.send_eof()
        with suppress(anyio.EndOfStream), anyio.fail_after(WAIT_S):
            while True:
                assert not await self._answers()


def _answered(message: Any) -> Iterator[str | None]:
    """The ids that a message from the daemon answers."""
    messages: Sequence[Any] = message if is_array(message) else [message]
    for one in messages:
        assert one["jsonrpc"] == "2.0"
        if "method" not in one:
            assert ("result" in one) != ("error" in one)
            yield None if one["id"] is None else json.dumps(one["id"])


class Good:
    """A client that gets what it asks for, whatever others do."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.rounds = 0
        self.stopped = False

    async def run(self) -> None:
        await self._client.request("session.create", m.CreateParams(session_id="good"))
        while not self.stopped:
            item = b'{"role":"user","content":"%d"}' % self.rounds
            params = m.AppendParams(session_id="good", items=[msgspec.Raw(item)])
            appended = await self._client.request("session.append", params)
            self.rounds += 1
            assert appended.entry_ids == [self.rounds]
            async for entry in self._client.pages("good", limit=1, order="desc"):
                assert bytes(entry.item) == item
                break
            await anyio.sleep(0.005)  # it is one among many, and not a load of its own


def resources(process: Process) -> tuple[int, int, int]:
    """The most bytes that were resident so far, descriptors and threads."""
    folder = Path(f"/proc/{process.process.pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return (
        int(status["VmHWM"].split()[0]) << 10,
        len(os.listdir(folder / "fd")),
        int(status["Threads"]),
    )


@pytest.mark.timeout(7200)
@pytest.mark.promise("J1", "J2")
async def test_whatever_is_sent_each_request_has_one_answer_and_others_are_served(
    serve: Serve,
) -> None:
    seed = random.randrange(1 << 30) if LONG else 4
    mutator = Mutator(seed)
    async with serve("--log-level", "warning") as process, process.connect() as client:
        before = resources(process)
        good = Good(client)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(good.run)
            for turn in range(FRAMES // _TURN):
                served = good.rounds
                async with await anyio.connect_unix(process.socket) as stream:
                    attacker = Attacker(stream, headers=turn % 3 == 2)
                    for start in range(0, _TURN, _AT_ONCE):
                        frames = [mutator.clear_frame() for _ in range(_AT_ONCE)]
                        frames[0] = b" " + frames[0]  # not the C of the other framing
                        try:
                            await attacker.exchange(frames, f"end-{start}")
                        except BaseException as error:
                            error.add_note(f"seed {seed}, turn {turn}, {start}")
                            raise
                    await attacker.leave()
                assert good.rounds > served + 5
            good.stopped = True
        after = resources(process)
        assert after[0] - before[0] < RSS_GROWTH_BYTES
        assert after[1] <= before[1] + 3
        assert after[2] <= before[2] + 8
    assert "Traceback" not in process.said()
    assert "incident" not in process.said()


@pytest.mark.promise("N3")
async def test_connections_that_end_at_any_point_leave_nothing(serve: Serve) -> None:
    """2 000 of them, in the middle of frames, requests, answers and subscriptions."""
    one = random.Random(5)
    mutator = Mutator(5)
    async with serve("--log-level", "warning") as process, process.connect() as client:
        await client.request("session.create", m.CreateParams(session_id="talk"))
        before = resources(process)

        async def come_and_go(times: int) -> None:
            for _ in range(times):
                async with await anyio.connect_unix(process.socket) as stream:
                    data = b"\n".join([mutator.frame() for _ in range(one.randrange(4))])
                    with suppress(anyio.BrokenResourceError):
                        await stream.send(data[: one.randrange(len(data) + 1)])
                        if one.random() < 0.3:
                            await stream.send(b"\n")
                        if one.random() < 0.3:
                            await stream.send_eof()

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(come_and_go, 100)
        with anyio.fail_after(WAIT_S):
            while (await client.request("server.info", m.Params())).connections > 1:
                pass
            while resources(process)[1] > before[1]:
                await client.request("protocol.ping", m.Params())
        assert resources(process)[2] <= before[2] + 8
        assert resources(process)[0] - before[0] < RSS_GROWTH_BYTES
    assert "Traceback" not in process.said()
