"""One connection to a daemon as its client sees it: requests out, answers and notifications in.

What a client can meet besides the error answers of `errors.py`::

    ClientError
    ├── NotConnected       no daemon could be reached; nothing was sent
    ├── ConnectionLost     the connection ended before the answer: nobody knows what took effect
    └── BadAnswer          what the server sent is not of this protocol

None of them, and nothing here, ever holds what was sent or received.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
import anyio.abc
import msgspec

from recapd.protocol.codec import Invalid, decode_frame
from recapd.protocol.errors import RpcError, from_wire
from recapd.protocol.framing import Framer, Framing
from recapd.protocol.messages import InitializeParams, InitializeResult
from recapd.protocol.methods import CANCEL_REQUEST

HANDSHAKE_TIMEOUT_S: Final = 5
"""For `protocol.initialize`, which a daemon answers between two reads of the socket."""

_FLUSH_TIMEOUT_S: Final = 0.5
# For what is still unsent when the client ends, such as a `$/cancelRequest`. The kernel's buffer is
# emptied by the daemon's reader at any time, so only a stopped daemon ever needs so long.

_READ_BYTES: Final = 1 << 18

_DEPTH_CHECKED_MAX: Final = 400  # what `decode_frame` takes


class ClientError(Exception):
    """Base of what is wrong with the connection, not with a request."""


class NotConnected(ClientError):
    """No daemon could be reached at the socket within the time; nothing was sent."""


class ConnectionLost(ClientError):
    """The connection ended before the answer came.

    Whether the request took effect is not known; where it carried an operation id, `operation.get`
    tells.
    """

    def __init__(self, operation_id: str | None = None) -> None:
        super().__init__("the connection ended before the answer came")
        self.operation_id = operation_id


class BadAnswer(ClientError):
    """The server sent something that is not of this protocol."""

    def __init__(self) -> None:
        super().__init__("the server sent something that is not of this protocol")


class NoticeHead(msgspec.Struct, frozen=True):
    """What a client looks at in the parameters of a notification."""

    subscription_id: str = ""
    session_id: str | None = None
    seq: int | None = None
    prev_seq: int = 0


class Sink(Protocol):
    """Takes the notifications of one subscription, in order, without waiting."""

    def told(self, method: str, head: NoticeHead, params: msgspec.Raw) -> None: ...

    def lost(self) -> None:
        """The connection ended: nothing more comes."""
        ...


_ABSENT: Final = msgspec.Raw(b"")


class _Incoming(msgspec.Struct, frozen=True):
    id: int | str | None = None
    method: str | None = None
    params: msgspec.Raw = msgspec.Raw(b"{}")
    result: msgspec.Raw = _ABSENT
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Incoming).decode
_decode_head = msgspec.json.Decoder(NoticeHead).decode
_decode_hello = msgspec.json.Decoder(InitializeResult).decode
_encode = msgspec.json.Encoder().encode

OnAnswer = Callable[["Link", msgspec.Raw], None]
"""Called with a result before the reader looks at the frame behind it."""


class _Waiter:
    __slots__ = ("_outcome", "done", "number", "on_answer")

    def __init__(self, number: int, on_answer: OnAnswer | None) -> None:
        self.number = number
        self.done = anyio.Event()
        self.on_answer = on_answer
        self._outcome: msgspec.Raw | Exception = BadAnswer()

    def settle(self, outcome: msgspec.Raw | Exception) -> None:
        self._outcome = outcome
        self.done.set()

    def result(self) -> msgspec.Raw:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class Link:
    """One connection after its handshake. `run` reads and writes; without it nothing moves.

    `sinks` are the subscriptions of this connection by id.
    """

    def __init__(
        self, stream: anyio.abc.ByteStream, framing: Framing, hello: InitializeResult
    ) -> None:
        self.hello = hello
        self.alive = True
        self.ended = anyio.Event()
        self.sinks: dict[str, Sink] = {}
        self._stream = stream
        self._socket: socket.socket = stream.extra(anyio.abc.SocketAttribute.raw_socket)
        self._framer = Framer(framing, frame_bytes_max=hello.limits.frame_bytes)
        self._slots = anyio.Semaphore(hello.limits.in_flight, fast_acquire=True)
        self._depth_max = min(hello.limits.depth, _DEPTH_CHECKED_MAX)
        self._waiting: dict[int, _Waiter] = {}
        self._next_id = 1
        self._outbox: list[bytes] = []
        self._more = anyio.Event()
        self._closing = False
        self._scope = anyio.CancelScope(shield=True)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Read and write until the server ends it, or `close` does. Raises nothing of its own."""
        try:
            # Not ended by the cancel that ends the client's block: a `$/cancelRequest` is to go out
            # first. `close`, which always follows, is what bounds it.
            with self._scope:
                async with self._stream, anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write, tasks.cancel_scope)
                    task_status.started()
                    fault = await self._read()
                    self._lose(fault)
                    tasks.cancel_scope.cancel()
        finally:
            self._lose(None)
            self.ended.set()

    async def abort(self) -> None:
        """Close the stream of a connection that `run` does not serve."""
        await anyio.aclose_forcefully(self._stream)

    async def close(self) -> None:
        """Send what is waiting to be sent, in bounded time, then end."""
        self._closing = True
        self._more.set()
        with anyio.move_on_after(_FLUSH_TIMEOUT_S, shield=True):
            await self.ended.wait()
        self._scope.cancel()

    async def request(
        self, method: str, params: bytes, on_answer: OnAnswer | None = None
    ) -> msgspec.Raw:
        """Send one request and return its result; waits while as many are in flight as may be.

        A cancel sends `$/cancelRequest` where the request went out; whether it took effect is then
        not known, and its late answer is dropped.

        Raises RpcError, ConnectionLost; before anything is sent also what the server would answer
        to bytes that are no request (ParseError, TooDeep, FrameTooLarge).
        """
        await self._slots.acquire()
        try:
            waiter = self._send(method, params, on_answer)
        except BaseException:
            self._slots.release()
            raise
        try:
            await waiter.done.wait()
        except BaseException:
            # The slot stays taken: for the server the request is in flight until it answers it.
            if not waiter.done.is_set():
                self.notify(CANCEL_REQUEST, {"id": waiter.number})
            raise
        return waiter.result()

    def notify(self, method: str, params: object) -> None:
        """Send a notification, if the connection is still there."""
        if self.alive:
            body = b'{"jsonrpc":"2.0","method":%b,"params":%b}' % (_encode(method), _encode(params))
            self._put(self._framer.encode(body))

    def _send(self, method: str, params: bytes, on_answer: OnAnswer | None) -> _Waiter:
        if not self.alive:
            raise ConnectionLost
        number = self._next_id
        frame = b'{"jsonrpc":"2.0","id":%d,"method":%b,"params":%b}' % (
            number,
            _encode(method),
            params,
        )
        # An error for a frame that is no request has no id: it could not be told which call it is
        # for.
        checked = decode_frame(frame, depth_max=self._depth_max)
        if isinstance(checked, Invalid):
            raise checked.error
        data = self._framer.encode(frame)
        self._next_id += 1
        waiter = self._waiting[number] = _Waiter(number, on_answer)
        self._put(data)
        return waiter

    def _put(self, data: bytes) -> None:
        self._outbox.append(data)
        self._more.set()

    async def _write(self, scope: anyio.CancelScope) -> None:
        # One writer: a send that is cancelled half way leaves half a frame, and then comes the
        # close.
        try:
            while self._outbox or not self._closing:
                if not self._outbox:
                    self._more = anyio.Event()
                    await self._more.wait()
                    continue
                data = b"".join(self._outbox)
                self._outbox.clear()
                await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            # The answers to what was sent before may still be there to be read.
            return
        scope.cancel()

    async def _read(self) -> Exception | None:
        """Until the stream ends; the fault that ended it, if there was one."""
        while True:
            try:
                # Waited for here: anyio's own wait, cancelled in the moment in which something
                # arrives, sets a future that is done, and the loop reports a fault of ours.
                await anyio.wait_readable(self._socket)
                data = await self._stream.receive(_READ_BYTES)
            except (
                anyio.EndOfStream,
                anyio.BrokenResourceError,
                anyio.ClosedResourceError,
                OSError,  # it was closed meanwhile
            ):
                return None
            try:
                for frame in self._framer.receive(data):
                    self._take(frame)
            except (msgspec.DecodeError, BadAnswer):
                return BadAnswer()
            except RpcError as error:
                return error
            if self._framer.fault is not None:
                return BadAnswer()

    def _take(self, frame: bytes) -> None:
        """Raises DecodeError, BadAnswer, RpcError: the connection is of no more use."""
        message = _decode(frame)
        if message.method is not None:
            head = _decode_head(message.params)
            sink = self.sinks.get(head.subscription_id)
            if sink is not None:
                sink.told(message.method, head, message.params)
            return
        if message.id is None:
            # The server could not read one of our frames, and nobody can say which.
            raise from_wire(message.error or {})
        if not isinstance(message.id, int) or message.id not in self._waiting:
            return
        waiter = self._waiting[message.id]
        if message.error is not None:
            outcome: msgspec.Raw | Exception = from_wire(message.error)
        elif message.result is _ABSENT:
            raise BadAnswer
        else:
            outcome = message.result
            if waiter.on_answer is not None:
                waiter.on_answer(self, message.result)
        del self._waiting[message.id]
        self._slots.release()
        waiter.settle(outcome)

    def _lose(self, fault: Exception | None) -> None:
        if not self.alive:
            return
        self.alive = False
        waiting, self._waiting = self._waiting, {}
        for waiter in waiting.values():
            waiter.settle(ConnectionLost() if fault is None else fault)
            self._slots.release()  # whoever waits for it finds the connection gone
        for sink in list(self.sinks.values()):
            sink.lost()
        self.sinks.clear()


async def open_link(path: Path, framing: Framing, params: InitializeParams) -> Link:
    """Connect and shake hands.

    Raises NotConnected, BadAnswer, and RpcError where the server refuses (UnsupportedProtocol,
    Unauthenticated, Overloaded, ShuttingDown).
    """
    try:
        with anyio.fail_after(HANDSHAKE_TIMEOUT_S):
            stream = await anyio.connect_unix(path)
            try:
                hello = await _shake_hands(stream, framing, params)
            except BaseException:
                await anyio.aclose_forcefully(stream)
                raise
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NotConnected("no daemon listens at the socket") from error
    except PermissionError as error:
        raise NotConnected("the socket may not be used by this user") from error
    except TimeoutError as error:
        raise NotConnected("the daemon does not answer") from error
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
        raise NotConnected("the daemon cannot be reached") from error
    return Link(stream, framing, hello)


async def _shake_hands(
    stream: anyio.abc.ByteStream, framing: Framing, params: InitializeParams
) -> InitializeResult:
    framer = Framer(framing)
    body = b'{"jsonrpc":"2.0","id":0,"method":"protocol.initialize","params":%b}' % _encode(params)
    await stream.send(framer.encode(body))
    while True:
        frames = framer.receive(await stream.receive(_READ_BYTES))
        if framer.fault is not None or len(frames) > 1:
            raise BadAnswer
        if frames:
            break
    try:
        answer = _decode(frames[0])
        if answer.error is not None:
            raise from_wire(answer.error)
        return _decode_hello(answer.result)
    except msgspec.DecodeError as error:
        raise BadAnswer from error
