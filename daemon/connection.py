"""One connection: bytes in, requests to the dispatcher, answers and notifications out.

One task reads; what the kernel does not take at once is written by another. A request that only
waits for a change to become durable has no task; every other has one, with a cancel scope of its
own. Requests of this connection for the same session take effect in the order in which they came
(PROTOCOL.md §1): changes overlap with changes and reads with reads, but not one with the other.
"""

import logging
import math
import select
from collections.abc import Callable, Coroutine, Hashable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from recapd.daemon.actor import Kind, Order
from recapd.daemon.authority import Principal
from recapd.daemon.dispatch import DECODERS, Later, rpc_error
from recapd.daemon.signal import Signal
from recapd.daemon.stream import Stream
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
    Unauthenticated,
)
from recapd.protocol.framing import Framer
from recapd.protocol.messages import CancelRequestParams, Params
from recapd.protocol.methods import CANCEL_REQUEST, METHODS

if TYPE_CHECKING:
    from recapd.daemon.service import Service

logger = logging.getLogger("recapd.connection")

T = TypeVar("T")

_LARGE_FRAME_BYTES: Final = 1 << 18  # decoded in a thread: a frame of 16 MiB takes 100 ms
_OUTPUT_HIGH_BYTES: Final = 4 << 20  # that much unsent, and nothing more is read from the peer
_OUTPUT_LIVE_BYTES: Final = 1 << 20  # that much unsent, and subscriptions go on from the log
_ERROR_BYTES_MAX: Final = 1 << 11  # of an error's frame, its id and hint included
_WAITING_MAX: Final = 1024  # requests of a connection that only wait, for an event or an end
_RETRY_AFTER_MS: Final = 50
_FRAMES_PER_TURN: Final = 64  # handled before other tasks get the event loop

_READS: Final = frozenset(
    {"session.get", "session.revisions", "session.export", "session.subscribe", "session.events"}
)


# Their answers may be as long as a frame; two at once are all that a peer that does not read holds.
_PAGES: Final = frozenset({"session.get", "session.export", "session.list"})
_PAGES_AT_ONCE: Final = 2


class Reply(Protocol):
    """Where the answer to a request goes: out, or into the answer to a batch."""

    room_bytes: int  # longest frame that it takes

    def send(self, frame: bytes, then: Callable[[], None] | None = None) -> None:
        """Take the answer; call `then` once nothing can come before it any more."""


class Call:
    """What a handler knows of the request: who asks, on which connection."""

    __slots__ = ("_leave", "connection", "only_waits", "principal", "service", "then")

    def __init__(
        self, connection: "Connection", principal: Principal, leave: Callable[[], None]
    ) -> None:
        self.connection = connection
        self.service = connection.service
        self.principal = principal
        self.only_waits = False
        self._leave = leave
        self.then: Callable[[], None] | None = None
        """What is to begin when the answer has been sent."""

    def release(self) -> None:
        """It has taken its place and now only waits: it holds up nothing that comes after it.

        Neither later requests for the same session nor, by being in flight, any others: a cancel
        must be heard.
        """
        self._leave()
        if not self.only_waits:
            self.only_waits = True
            self.connection.waiting += 1


class Connection(Reply):
    """Made by the listener, and served until either side ends it."""

    def __init__(self, stream: Stream, principal: Principal, service: "Service") -> None:
        settings = service.settings
        self.service = service
        self.principal = principal
        self.fresh = True  # no request came yet: `protocol.initialize` may be the first
        self.subscriptions: set[str] = set()
        self._settings = settings
        self._stream = stream
        self._framer = Framer(frame_bytes_max=settings.frame_bytes_max)
        self.room_bytes = settings.frame_bytes_max
        self.waiting = 0  # requests in flight that only wait
        self._in_flight: dict[Hashable, anyio.CancelScope | None] = {}
        self._lanes: dict[str, Order] = {}
        self._tasks: TaskGroup
        self._output: list[bytes] = []
        self._output_bytes = 0  # not taken by the kernel yet
        self._flush_is_due = False  # somebody will call `flush`
        self._writing = False  # there is a task that waits for the peer to read
        self._progress = Signal()  # a request was answered, or output was sent
        self._pages = anyio.Semaphore(_PAGES_AT_ONCE)
        self._overloaded = False
        self._ending = False
        self._ended = False

    # The life of a connection.

    async def serve(self) -> None:
        """Until the peer has gone or `end` was called. Raises nothing of its own."""
        try:
            async with anyio.create_task_group() as self._tasks:
                await self._read()
                if self._peer_is_gone():
                    self._tasks.cancel_scope.cancel()
                else:
                    # It sends no more but may still be reading: what is under way is answered.
                    await self._end_when_answered()
        finally:
            self._ended = True
            self._stream.close()
            self.service.subscriptions.drop(self)

    def drain(self) -> None:
        """End the connection once every request under way is answered."""
        self._tasks.start_soon(self._end_when_answered)

    def present(self, token: str) -> None:
        """Be what the token says from now on; nobody, if it is not good. Raises Unauthenticated."""
        authority = self.service.authority
        self.principal = authority.nobody
        self.principal = authority.authenticate(token)
        self.start(self._end_at_expiry, self.principal)

    async def _end_at_expiry(self, principal: Principal) -> None:
        await principal.expiry()
        self.shut_out()

    def shut_out(self) -> None:
        """Its token is no longer good: what waits is refused, and nothing more is told."""
        for scope in list(self._in_flight.values()):
            if scope is not None:  # a change that was handed over is answered as it ends
                scope.cancel()
        self.service.subscriptions.end_all_of(self)

    async def _end_when_answered(self) -> None:
        while self._in_flight:
            await self._progress.wait()
        self.end()

    def end(self) -> None:
        """Send what is waiting to be sent, then close."""
        self._ending = True
        self.flush()

    def _peer_is_gone(self) -> bool:
        """At the end of its stream: has it closed both ways, or only its own (shutdown(2))?"""
        if self._framer.fault is not None or self._ending:
            return False
        poll = select.poll()
        poll.register(self._stream.socket, 0)
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    async def _read(self) -> None:
        framer = self._framer
        deadline_s = math.inf  # of the frame that has begun
        while True:
            self.flush()
            try:
                with anyio.fail_at(deadline_s) if framer.pending else nullcontext():
                    data = await self._stream.receive()
            except TimeoutError:
                logger.info("a client did not end a frame in time: its connection is closed")
                self.end()
                return
            except OSError:
                return
            if not data:
                return
            had_begun = framer.pending
            self.service.stalls.heed()
            self._flush_is_due = True  # all answers that need no waiting go out together
            frames = framer.receive(data)
            for count, frame in enumerate(frames, start=1):
                await self._take(frame)
                while (
                    self._overloaded and self.at_work > self._settings.in_flight_max // 2
                ) or self._output_bytes > _OUTPUT_HIGH_BYTES:
                    await self._pause()
                self._overloaded = False
                if count % _FRAMES_PER_TURN == 0:
                    await anyio.lowlevel.checkpoint()
            if framer.fault is not None:
                self.send(encode_error(NULL, framer.fault))
                return
            if frames or not had_begun:  # what is unfinished now has only begun
                deadline_s = anyio.current_time() + self._settings.frame_timeout_s

    @property
    def at_work(self) -> int:
        """How many requests are under way and do not only wait."""
        return len(self._in_flight) - self.waiting

    async def _pause(self) -> None:
        """Let the reader wait until a request was answered or output was sent."""
        self.flush()
        await self._progress.wait()

    # Output.

    def send(self, frame: bytes, then: Callable[[], None] | None = None) -> None:
        """Queue one frame; it goes out at the end of this turn of the event loop at the latest."""
        if self._ended:
            return
        try:
            data = self._framer.encode(frame)
        except FrameTooLarge:
            # Of an event, for answers were measured. It must not be left out, so this is the end.
            logger.error("an event does not fit into a frame: a connection is closed")
            self.end()
            return
        self._output.append(data)
        self._output_bytes += len(data)
        if not self._flush_is_due:
            self._flush_is_due = True
            self.service.flusher.add(self)
        if then is not None:
            then()

    def flush(self) -> None:
        """Give the kernel what is queued; what it does not take is sent by a task of its own."""
        self._flush_is_due = False
        if self._writing:
            return
        if self._output:
            data = b"".join(self._output)
            self._output.clear()
            try:
                sent = self._stream.try_send(data)
            except OSError:
                self._tasks.cancel_scope.cancel()
                return
            self._output_bytes -= sent
            if sent < len(data):
                self._writing = True
                self._tasks.start_soon(self._write, data[sent:])
                return
            self._progress.send()
        if self._ending:
            self._tasks.cancel_scope.cancel()

    async def _write(self, data: bytes) -> None:
        """Send all that is queued, starting with `data`. After an interrupted write comes the
        close.
        """
        while data:
            try:
                with anyio.fail_after(self._settings.send_timeout_s):
                    await self._stream.send(data)
            except (OSError, TimeoutError):
                self._tasks.cancel_scope.cancel()
                return
            self._output_bytes -= len(data)
            data = b"".join(self._output)
            self._output.clear()
            self._progress.send()
        self._writing = False
        self.flush()

    @property
    def keeps_up(self) -> bool:
        """Whether the peer takes what it is sent."""
        return self._output_bytes < _OUTPUT_LIVE_BYTES

    async def wait_until_it_keeps_up(self) -> None:
        while not self.keeps_up:
            await self._progress.wait()

    def start(self, function: Callable[[T], Coroutine[Any, Any, object]], argument: T) -> None:
        """Run it beside, for as long as the connection lives; not at all when it has ended."""
        if not self._ended:
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
            self.flush()
            message = await anyio.to_thread.run_sync(decode)
        else:
            message = decode()
        if not isinstance(message, list):
            await self._one(message, self)
            return
        batch = _Batch(self, sum(one.id is not None for one in message))
        for one in message:
            while self.at_work >= self._settings.in_flight_max:
                await self._pause()  # a batch may be longer than what may be in flight
            await self._one(one, batch)

    async def _one(self, message: Request | Invalid, reply: Reply) -> None:
        if isinstance(message, Invalid):
            if message.id is not None:
                reply.send(encode_error(message.id, message.error))
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
        if self.at_work >= self._settings.in_flight_max:
            self._overloaded = True
            raise Overloaded(retry_after_ms=_RETRY_AFTER_MS)
        if self.waiting >= _WAITING_MAX:
            raise Overloaded(retry_after_ms=_RETRY_AFTER_MS)
        params = decode_params(DECODERS[request.method], request.params)
        if request.method != "protocol.initialize":
            self.fresh = False
        session_id: str | None = getattr(params, "session_id", None)
        release: Callable[[], None] = _nothing
        if session_id is not None:
            lane = self._lanes.get(session_id)
            if lane is None:
                lane = self._lanes[session_id] = Order()
            release = _Release(self._lanes, session_id, lane)
            if request.method in _READS:
                kind = Kind.READ
            else:  # a change that has a task takes its place in the actor only later
                kind = Kind.CHANGE if method.inline else Kind.EXCLUSIVE
            if not lane.enter(kind):
                scope = self._in_flight[key] = anyio.CancelScope()

                def begin() -> None:
                    if self._ended:
                        release()
                    else:
                        self._tasks.start_soon(
                            self._run, request, reply, params, key, release, scope
                        )

                lane.wait(kind, begin)
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
        if not isinstance(result, Later):
            release()
            self._answer(request, reply, result, call.then)
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
                async with self._pages if request.method in _PAGES else nullcontext():
                    await self.wait_until_it_keeps_up()
                    result = await self.service.dispatcher(call, request.method, params)
                if isinstance(result, Later):
                    with anyio.CancelScope(
                        shield=True
                    ):  # it was handed over: its outcome is the answer
                        await result.pending.settled()
                    result = result.result()
                self._answer(request, reply, result, call.then)
                return
            if not self.principal.active:
                error = Unauthenticated()
        except RpcError as raised:
            error = raised
        finally:
            release()
            del self._in_flight[key]
            self.waiting -= call.only_waits
            self._progress.send()
        self._refuse(request, reply, error)

    def _answer(
        self,
        request: Request,
        reply: Reply,
        result: object,
        then: Callable[[], None] | None = None,
    ) -> None:
        if request.id is None:
            if then is not None:
                then()
            return
        try:
            if isinstance(result, msgspec.Struct):  # whose types say that it is strict JSON
                result = msgspec.Raw(_encode(result))
            frame = encode_result(request.id, result)
            if len(frame) > reply.room_bytes:
                raise FrameTooLarge(limit_bytes=self._settings.frame_bytes_max)
        except RpcError as error:
            frame = encode_error(request.id, error)
        except Unencodable as error:
            frame = encode_error(request.id, rpc_error(error))
        reply.send(frame, then)

    def _refuse(self, request: Request, reply: Reply, error: RpcError) -> None:
        if request.id is not None:
            reply.send(encode_error(request.id, error))

    def _cancel(self, request: Request) -> None:
        """`$/cancelRequest`: an id that is not under way is ignored: a late cancel is no fault."""
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


class _Batch(Reply):
    """Gathers the answers to a batch; they go out together (JSON-RPC 2.0, section 6)."""

    def __init__(self, reply: Reply, expected: int) -> None:
        self._reply = reply
        self._expected = expected
        self._answers: list[bytes] = []
        self._then: list[Callable[[], None]] = []
        # All answers share one frame; there is always room for the error of one that does not fit.
        self.room_bytes = reply.room_bytes - expected * _ERROR_BYTES_MAX

    def send(self, frame: bytes, then: Callable[[], None] | None = None) -> None:
        self._answers.append(frame)
        self.room_bytes -= max(0, len(frame) - _ERROR_BYTES_MAX)
        if then is not None:
            self._then.append(then)
        if len(self._answers) == self._expected:
            self._reply.send(encode_batch(self._answers), self._sent)

    def _sent(self) -> None:
        for then in self._then:
            then()


def _nothing() -> None:
    pass


_encode = msgspec.json.Encoder().encode
_cancel_decoder = msgspec.json.Decoder(CancelRequestParams)


class Flusher:
    """Sends what connections have queued, once a turn of the event loop for all of them."""

    def __init__(self) -> None:
        self._due: list[Connection] = []
        self._signal = Signal()

    def add(self, connection: Connection) -> None:
        self._due.append(connection)
        if len(self._due) == 1:
            self._signal.send()

    async def run(self) -> None:
        while True:
            if not self._due:
                await self._signal.wait()
            due, self._due = self._due, []
            for connection in due:
                connection.flush()
