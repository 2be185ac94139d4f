"""A model provider of the tests' own, on the loopback: it answers, and fails, as it is told.

`python -m tests.provider_stub` runs one as a process: it prints its port, and the first part of the
path of a request names one of `PLAYS`, so `http://127.0.0.1:PORT/stall/v1` is one that stalls.
"""

import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final, get_args

import anyio
import anyio.abc
import anyio.to_thread

from recapd.daemon.compaction.summarise.settings import Kind

Json = dict[str, Any]
KINDS: tuple[Kind, ...] = get_args(Kind)
SUMMARY = "The build fails: Makefile:3 names a file that is gone."
ODD = "one\u2028two\u2029three\u0085four\x0cfive 🙂"


@dataclass(eq=False)
class Exchange:
    """One request as it came, and the connection to answer on."""

    path: str
    headers: dict[str, str]
    body: Json
    size: int
    connection: anyio.abc.SocketStream

    @property
    def text(self) -> str:
        """All that the model would read."""
        return json.dumps(self.body, ensure_ascii=False)

    async def send(self, data: bytes) -> None:
        await self.connection.send(data)

    async def reply(
        self, value: object, status: int = 200, kind: str = "application/json", more: str = ""
    ) -> None:
        """A whole answer, after which the connection may be used again."""
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        await self.send(f"{head}{more}\r\n".encode() + body)

    async def stream(self, data: bytes = b"") -> None:
        """The head of a stream that ends with its connection, and its beginning."""
        head = b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        await self.send(head + data)


Play = Callable[[Exchange], Awaitable[None]]


@dataclass(eq=False)
class Stub:
    """The server. Each request is answered by the next of `plays`, the last again and again."""

    port: int
    plays: list[Play] = field(default_factory=list[Play])
    requests: list[Exchange] = field(default_factory=list[Exchange])
    connections: int = 0
    changed: anyio.Event = field(default_factory=anyio.Event)

    async def serve(self, connection: anyio.abc.SocketStream) -> None:
        self._count(1)
        try:
            async with connection:
                goes_on = True
                while goes_on and (exchange := await _request(connection)) is not None:
                    self.requests.append(exchange)
                    play = self.plays[min(len(self.requests), len(self.plays)) - 1]
                    goes_on = await _perform(play, exchange)
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.connections += change
        changed, self.changed = self.changed, anyio.Event()
        changed.set()

    async def until_connections(self, number: int) -> None:
        with anyio.fail_after(5):
            while self.connections != number:
                await self.changed.wait()


class Hang(Exception):
    """Close the connection now."""


async def _perform(play: Play, exchange: Exchange) -> bool:
    """Play until it is done or the client leaves; whether the connection is still of use."""
    goes_on = False

    async def watch() -> None:
        try:
            await exchange.connection.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            await play(exchange)
            goes_on = True
        except (Hang, anyio.BrokenResourceError):
            pass
        tasks.cancel_scope.cancel()
    return goes_on


async def _request(connection: anyio.abc.SocketStream) -> Exchange | None:
    data = b""
    try:
        while b"\r\n\r\n" not in data:
            data += await connection.receive()
        head, _, body = data.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines[1:])}
        size = int(headers["content-length"])
        pieces, length = [body], len(body)
        while length < size:
            pieces.append(await connection.receive())
            length += len(pieces[-1])
        body = b"".join(pieces)
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        return None
    return Exchange(lines[0].split()[1], headers, json.loads(body), size, connection)


@asynccontextmanager
async def serving(*plays: Play) -> AsyncGenerator[Stub]:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        stub = Stub(listener.extra(anyio.abc.SocketAttribute.local_port), list(plays))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, stub.serve)
            yield stub
            tasks.cancel_scope.cancel()


def whole(kind: Kind, text: str) -> Json:
    """An answer in one piece."""
    match kind:
        case "responses":
            content = [{"type": "output_text", "text": text}]
            return {
                "status": "completed",
                "output": [
                    {"type": "reasoning", "summary": []},
                    {"type": "message", "role": "assistant", "content": content},
                ],
                "usage": {
                    "input_tokens": 30,
                    "input_tokens_details": {"cached_tokens": 10},
                    "output_tokens": 5,
                },
            }
        case "chat":
            return {
                "choices": [{"message": {"content": text}, "finish_reason": "stop"}],
                "usage": {
                    "prompt_tokens": 30,
                    "prompt_tokens_details": {"cached_tokens": 10},
                    "completion_tokens": 5,
                },
            }
        case "anthropic":
            return {
                "content": [{"type": "text", "text": text}],
                "stop_reason": "end_turn",
                "usage": {"input_tokens": 20, "cache_read_input_tokens": 10, "output_tokens": 5},
            }


def events(kind: Kind, text: str) -> list[Json | str]:
    """The events of an answer that comes in pieces."""
    pieces = [text[:5], text[5:]]
    match kind:
        case "responses":
            return [
                {"type": "response.created", "response": {"status": "in_progress"}},
                *({"type": "response.output_text.delta", "delta": piece} for piece in pieces),
                {"type": "response.completed", "response": whole(kind, text)},
            ]
        case "chat":
            return [
                *({"choices": [{"delta": {"content": piece}}]} for piece in pieces),
                {"choices": [{"delta": {}, "finish_reason": "stop"}]},
                {"choices": [], "usage": whole(kind, text)["usage"]},
                "[DONE]",
            ]
        case "anthropic":
            usage = {"input_tokens": 20, "cache_read_input_tokens": 10, "output_tokens": 1}
            return [
                {"type": "message_start", "message": {"usage": usage}},
                {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
                {"type": "ping"},
                *({"type": "content_block_delta", "delta": {"text": piece}} for piece in pieces),
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": "end_turn"},
                    "usage": {"output_tokens": 5},
                },
                {"type": "message_stop"},
            ]


def sse(events: Sequence[Json | str], end: str = "\n") -> bytes:
    lines = [
        f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}"
        for event in events
    ]
    return "".join(f"{line}{end}{end}" for line in lines).encode()


def says(kind: Kind, text: str = SUMMARY, end: str = "\n") -> Play:
    """Answers as it is asked to, in pieces or in one."""

    async def play(exchange: Exchange) -> None:
        if exchange.body["stream"]:
            await exchange.stream(sse(events(kind, text), end))
            raise Hang
        await exchange.reply(whole(kind, text))

    return play


def refuses(status: int, value: object = b"", more: str = "") -> Play:
    async def play(exchange: Exchange) -> None:
        await exchange.reply(value, status, more=more)

    return play


async def never(exchange: Exchange) -> None:
    await anyio.sleep_forever()


def error(code: str, message: str = "no") -> Json:
    """The body of an error, which all three providers write much alike."""
    return {"type": "error", "error": {"type": code, "code": code, "message": message}}


def kind_of(exchange: Exchange) -> Kind:
    """How it was asked."""
    ends: dict[str, Kind] = {"responses": "responses", "messages": "anthropic"}
    return ends.get(exchange.path.rpartition("/")[2], "chat")


async def answer(exchange: Exchange) -> None:
    """Answers at once."""
    await says(kind_of(exchange))(exchange)


async def drip(exchange: Exchange) -> None:
    """Sends a good answer byte by byte."""
    await exchange.stream()
    for byte in sse(events(kind_of(exchange), SUMMARY)):
        await exchange.send(bytes((byte,)))
    raise Hang


async def stall(exchange: Exchange) -> None:
    """Begins to answer and says no more."""
    await exchange.stream(sse(events(kind_of(exchange), SUMMARY)[:2]))
    await anyio.sleep_forever()


async def cut(exchange: Exchange) -> None:
    """Closes the connection within an answer."""
    whole_answer = sse(events(kind_of(exchange), SUMMARY))
    await exchange.stream(whole_answer[: len(whole_answer) // 2])
    raise Hang


async def lie(exchange: Exchange) -> None:
    """Says that it is JSON, and is not."""
    await exchange.reply(b"<html>You are in the best of hands.</html>")


async def limit(exchange: Exchange) -> None:
    """Asks to come again in an hour."""
    await exchange.reply(error("rate_limit_exceeded"), 429, more="Retry-After: 3600\r\n")


async def fail_after_200(exchange: Exchange) -> None:
    """Reports an error in the middle of a stream."""
    told = error("server_error")
    if kind_of(exchange) == "responses":
        told = {"type": "response.failed", "response": {"status": "failed", **told}}
    await exchange.stream(sse([*events(kind_of(exchange), SUMMARY)[:2], told]))
    raise Hang


async def refuse(exchange: Exchange) -> None:
    """Does not take the key, and repeats it."""
    key = exchange.headers.get("x-api-key") or exchange.headers.get("authorization", "")
    await exchange.reply(error("invalid_api_key", f"wrong key: {key}"), 401)


async def down(exchange: Exchange) -> None:
    """Has a fault."""
    await exchange.reply(b"", 503)


async def narrow(exchange: Exchange) -> None:
    """Takes no more than 20 kB."""
    if exchange.size > 20_000:
        await exchange.reply(error("context_length_exceeded"), 400)
    else:
        await answer(exchange)


PLAYS: Final[Mapping[str, Play]] = {
    play.__name__: play
    for play in (answer, drip, stall, cut, lie, limit, fail_after_200, refuse, down, narrow)
}


async def _main() -> None:
    async def play(exchange: Exchange) -> None:
        await PLAYS[exchange.path.split("/")[1]](exchange)

    async with serving(play) as stub:
        print(stub.port, flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)  # until whoever started it ends


if __name__ == "__main__":
    anyio.run(_main)
