"""One connection: bytes in, requests to the dispatcher, answers and notifications out.

One task reads, one writes. A request that only waits for a change to become durable has no task; every other has
one, with a cancel scope of its own. Requests of this connection for the same session take effect in the order in
which they came (PROTOCOL.md §1): changes overlap with changes and reads with reads, but not one with the other.
"""

import select
import socket
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from anyio.abc import SocketAttribute, SocketStream, TaskGroup

from recapd.daemon.actor import Kind, Order
from recapd.daemon.authority import Principal
from recapd.daemon.dispatch import DECODERS, Later, rpc_error
from recapd.daemon.signal import Signal
from recapd.protocol.codec import (
    NULL,
    Invalid,
    Request,
    Unencodable,
    decode_frame,
    decode_params,
    encode_batch,
    encode_error,
    encode_result,
    request_key,
)
from recapd.protocol.errors import (
    DuplicateRequestId,
    FrameTooLarge,
    MethodNotFound,
    Overloaded,
    RequestCancelled,
    RpcError,
    ShuttingDown,
)
from recapd.protocol.framing import Framer
from recapd.protocol.messages import CancelRequestParams, Params
from recapd.protocol.methods import CANCEL_REQUEST, METHODS, Method

if TYPE_CHECKING:
    from recapd.daemon.service import Service

T = TypeVar("T")

_READ_BYTES: Final = 1 << 18
_LARGE_FRAME_BYTES: Final = 1 << 18  # decoded in a thread: a frame of 16 MiB takes 100 ms
_OUTPUT_HIGH_BYTES: Final = 4 << 20  # that much unsent, and nothing more is read from the peer
_OUTPUT_LIVE_BYTES: Final = 1 << 20  # that much unsent, and subscriptions go on from the log
_RETRY_AFTER_MS: Final = 50
_FRAMES_PER_TURN: Final = 64  # handled before other tasks get the event loop

_READS: Final = frozenset(
    {"session.get", "session.revisions", "session.export", "session.subscribe", "session.events"}
)

Reply = Callable[[bytes], None]


class Call:
    """What a handler knows of the request: who asks, on which connection."""

    __slots__ = ("connection", "principal", "release", "service")

    def __init__(
        self, connection: "Connection", principal: Principal, release: Callable[[], None]
    ) -> None:
        self.connection = connection
        self.service = connection.service
        self.principal = principal
        self.release = release
        """Let later requests for the same session begin; for one that has taken its place and now only waits."""


class Connection:
    """Made by the listener, and served until either side ends it."""

    def __init__(self, stream: SocketStream, principal: Principal, service: "Service") -> None:
        settings = service.settings
        self.service = service
        self.principal = principal
        self.fresh = True  # no request came yet: `protocol.initialize` may be the first
        self.subscriptions: set[str] = set()
        self._settings = settings
        self._stream = stream
        self._framer = Framer(frame_bytes_max=settings.frame_bytes_max)
        self._in_flight: dict[Hashable, anyio.CancelScope | None] = {}
        self._lanes: dict[str, Order] = {}
        self._tasks: TaskGroup
        self._output: list[bytes] = []
        self._output_bytes = 0
        self._output_ready = anyio.Event()
        self._progress = Signal()  # a request was answered, or output was sent
        self._overloaded = False
        self._ending = False

    # The life of a connection.

    async def serve(self) -> None:
        """Until the peer has gone, was refused, or `close` was called. Raises nothing of its own."""
        try:
            async with self._stream, anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._write)
                await self._read()
                if not self._peer_is_gone():
                    # It sends no more but may still be reading: what is under way is answered.
                    await self._end_when_answered()
                else:
                    self._tasks.cancel_scope.cancel()
        finally:
            self.service.subscriptions.drop(self)

    def drain(self) -> None:
        """End the connection once every request under way is answered."""
        self._tasks.start_soon(self._end_when_answered)

    async def _end_when_answered(self) -> None:
        while self._in_flight:
            await self._progress.wait()
        self.end()

    def end(self) -> None:
        """Send what is waiting to be sent, then close."""
        self._ending = True
        self._output_ready.set()

    def _peer_is_gone(self) -> bool:
        """At the end of its stream: has it closed both directions, or only its own (shutdown(2))?"""
        if self._framer.fault is not None or self._ending:
            return False
        poll = select.poll()
        poll.register(self._stream.extra(SocketAttribute.raw_socket), 0)
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    async def _read(self) -> None:
        framer = self._framer
        while True:
            try:
                data = await self._stream.receive(_READ_BYTES)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return
            for count, frame in enumerate(framer.receive(data), start=1):
                await self._take(frame)
                while (
                    self._overloaded and len(self._in_flight) > self._settings.in_flight_max // 2
                ) or self._output_bytes > _OUTPUT_HIGH_BYTES:
                    await self._progress.wait()
                self._overloaded = False
                if count % _FRAMES_PER_TURN == 0:
                    await anyio.lowlevel.checkpoint()
            if framer.fault is not None:
                self.send(encode_error(NULL, framer.fault))
                return

    async def _write(self) -> None:
        while True:
            if not self._output:
                if self._ending:
                    self._tasks.cancel_scope.cancel()
                    return
                self._output_ready = anyio.Event()
                await self._output_ready.wait()
                continue
            # Half a frame is never left on the stream: after an interrupted write comes the close.
            data = b"".join(self._output)
            self._output.clear()
            try:
                with anyio.fail_after(self._settings.send_timeout_s):
                    await self._stream.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError, TimeoutError):
                self._tasks.cancel_scope.cancel()
                return
            self._output_bytes -= len(data)
            self._progress.send()

    # Output.

    def send(self, frame: bytes) -> None:
        """Queue one frame."""
        data = self._framer.encode(frame)
        self._output.append(data)
        self._output_bytes += len(data)
        self._output_ready.set()

    @property
    def keeps_up(self) -> bool:
        """Whether the peer takes what it is sent."""
        return self._output_bytes < _OUTPUT_LIVE_BYTES

    async def wait_until_it_keeps_up(self) -> None:
        while not self.keeps_up:
            await self._progress.wait()

    def start(self, function: Callable[[T], Awaitable[object]], argument: T) -> None:
        """Run it beside, for as long as the connection lives."""
        self._tasks.start_soon(function, argument)

    # Requests.

    async def _take(self, frame: bytes) -> None:
        decode = partial(
            decode_frame,
            frame,
            depth_max=self._settings.depth_max,
            batch_max=self._settings.batch_max,
        )
        if len(frame) > _LARGE_FRAME_BYTES:
            message = await anyio.to_thread.run_sync(decode)
        else:
            message = decode()
        if not isinstance(message, list):
            await self._one(message, self.send)
            return
        batch = _Batch(self.send, sum(one.id is not None for one in message))
        for one in message:
            while len(self._in_flight) >= self._settings.in_flight_max:
                await self._progress.wait()  # a batch may be longer than what may be in flight
            await self._one(one, batch.add)

    async def _one(self, message: Request | Invalid, reply: Reply) -> None:
        if isinstance(message, Invalid):
            if message.id is not None:
                reply(encode_error(message.id, message.error))
            return
        try:
            await self._begin(message, reply)
        except RpcError as error:
            self._refuse(message, reply, error)

    async def _begin(self, request: Request, reply: Reply) -> None:
        """Raises RpcError where the request is refused before it takes its place."""
        method = METHODS.get(request.method)
        if method is None:
            if request.method == CANCEL_REQUEST and request.id is None:
                self._cancel(request)
                return
            raise MethodNotFound
        key: Hashable = request.key if request.key is not None else object()
        if key in self._in_flight:
            raise DuplicateRequestId
        if self.service.draining:
            raise ShuttingDown
        if len(self._in_flight) >= self._settings.in_flight_max:
            self._overloaded = True
            raise Overloaded(retry_after_ms=_RETRY_AFTER_MS)
        params = decode_params(DECODERS[request.method], request.params)
        session_id: str | None = getattr(params, "session_id", None)
        release: Callable[[], None] = _nothing
        if session_id is not None:
            lane = self._lanes.get(session_id)
            if lane is None:
                lane = self._lanes[session_id] = Order()
            release = _Release(self._lanes, session_id, lane)
            kind = Kind.READ if request.method in _READS else Kind.CHANGE
            if not lane.enter(kind):
                scope = self._in_flight[key] = anyio.CancelScope()
                lane.wait(
                    kind,
                    partial(
                        self._tasks.start_soon,
                        self._run,
                        request,
                        reply,
                        params,
                        key,
                        release,
                        scope,
                    ),
                )
                return
        if method.inline:
            await self._run_inline(request, reply, params, key, release)
        else:
            scope = self._in_flight[key] = anyio.CancelScope()
            self._tasks.start_soon(self._run, request, reply, params, key, release, scope)

    async def _run_inline(
        self,
        request: Request,
        reply: Reply,
        params: Params,
        key: Hashable,
        release: Callable[[], None],
    ) -> None:
        call = Call(self, self.principal, release)
        try:
            result = await self.service.dispatcher(call, request.method, params)
        except RpcError as error:
            release()
            raise error from None
        finally:
            self.fresh = False
        if not isinstance(result, Later):
            release()
            self._answer(request, reply, result)
            return
        later = result
        self._in_flight[key] = None

        def done(_: object) -> None:
            release()
            del self._in_flight[key]
            self._progress.send()
            try:
                self._answer(request, reply, later.result())
            except RpcError as error:
                self._refuse(request, reply, error)

        later.pending.on_done(done)

    async def _run(
        self,
        request: Request,
        reply: Reply,
        params: Params,
        key: Hashable,
        release: Callable[[], None],
        scope: anyio.CancelScope,
    ) -> None:
        call = Call(self, self.principal, release)
        error: RpcError = RequestCancelled()
        try:
            with scope:
                await self.wait_until_it_keeps_up()
                result = await self.service.dispatcher(call, request.method, params)
                if isinstance(result, Later):
                    with anyio.CancelScope(
                        shield=True
                    ):  # it was handed over: its outcome is the answer
                        await result.pending.settled()
                    result = result.result()
                self._answer(request, reply, result)
                return
        except RpcError as raised:
            error = raised
        finally:
            release()
            self.fresh = False
            del self._in_flight[key]
            self._progress.send()
        self._refuse(request, reply, error)

    def _answer(self, request: Request, reply: Reply, result: object) -> None:
        if request.id is None:
            return
        try:
            frame = encode_result(request.id, result)
            if len(frame) > self._settings.frame_bytes_max:
                raise FrameTooLarge(limit_bytes=self._settings.frame_bytes_max)
        except RpcError as error:
            frame = encode_error(request.id, error)
        except Unencodable as error:
            frame = encode_error(request.id, rpc_error(error))
        reply(frame)

    def _refuse(self, request: Request, reply: Reply, error: RpcError) -> None:
        if request.id is not None:
            reply(encode_error(request.id, error))

    def _cancel(self, request: Request) -> None:
        """`$/cancelRequest`: ids that are not under way are ignored, as a late cancel is no fault."""
        try:
            params = decode_params(_cancel_decoder, request.params)
        except RpcError:
            return
        scope = self._in_flight.get(request_key(msgspec.json.encode(params.id)))
        if scope is not None:
            scope.cancel()


class _Release:
    """Leaves a lane, once."""

    __slots__ = ("_lane", "_lanes", "_left", "_session_id")

    def __init__(self, lanes: dict[str, Order], session_id: str, lane: Order) -> None:
        self._lanes = lanes
        self._session_id = session_id
        self._lane = lane
        self._left = False

    def __call__(self) -> None:
        if not self._left:
            self._left = True
            self._lane.leave()
            if self._lane.idle:
                self._lanes.pop(self._session_id, None)


class _Batch:
    """Gathers the answers to a batch; they go out together (JSON-RPC 2.0, section 6)."""

    def __init__(self, send: Reply, expected: int) -> None:
        self._send = send
        self._expected = expected
        self._answers: list[bytes] = []

    def add(self, answer: bytes) -> None:
        self._answers.append(answer)
        if len(self._answers) == self._expected:
            self._send(encode_batch(self._answers))


def _nothing() -> None:
    pass


_cancel_decoder = msgspec.json.Decoder(CancelRequestParams)
