"""The client that the command line, the tests and other programs use; on asyncio and on trio.

::

    async with connect(path) as client:
        created = await client.request("session.create", CreateParams(title="a talk"))
        async for appended in client.append_items(created.session.session_id, items):
            ...
        async with client.subscribe() as events:
            async for notice in events:
                ...

A request outlives its connection: it is sent again over the next one, after a pause that grows and
is bounded together with all others (`Patience`). That is safe for what only reads; a change is
given an `operation_id` where it has none, so that the server answers the repetition with the
recorded result. What is neither is never repeated. `overloaded` and `shutting_down` promise that
nothing was done and are waited out likewise; `outcome_unknown` is answered with one repetition,
which finds out.

Errors: the classes of `errors.py` for what the server answers, those of `link.py` for a connection
that fails. Nothing here logs, and no error says what was sent or received.
"""

import os
import random
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, overload

import anyio
import anyio.abc
import msgspec
from msgspec import Raw

from recapd.protocol import messages as m
from recapd.protocol.errors import ItemTooLarge, OutcomeUnknown, Overloaded, RpcError, ShuttingDown
from recapd.protocol.framing import Framing
from recapd.protocol.link import (
    BadAnswer,
    ClientError,
    ConnectionLost,
    Link,
    NotConnected,
    OnAnswer,
    open_link,
)
from recapd.protocol.methods import METHODS
from recapd.protocol.subscription import RESET, Notice, Since, Subscription

__all__ = [
    "RESET",
    "BadAnswer",
    "Client",
    "ClientError",
    "ConnectionLost",
    "Export",
    "NotConnected",
    "Notice",
    "Patience",
    "Subscription",
    "connect",
]

_CHANGES: Final = frozenset(
    name
    for name, method in METHODS.items()
    if "operation_id" in method.params.__struct_fields__
    and not issubclass(method.params, m.OperationParams)
)
"""What takes an operation id, and so may be sent again."""

_ONCE: Final = frozenset(
    {"protocol.initialize", "server.shutdown", "session.unsubscribe", "token.create"}
)
"""What would do something else the second time, or to the next server or connection."""

_PAGE_BYTES: Final = 4 << 20

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a call waits for better times, and in what steps.

    `total_s` is for all its pauses and attempts to connect together.

    The first repetition follows at once; then pauses double from `pause_s` up to `pause_max_s`,
    each shortened by up to a half at random, so that many clients do not come back at the same
    moment.
    """

    total_s: float = 30.0
    pause_s: float = 0.05
    pause_max_s: float = 2.0
    random: Callable[[], float] = random.random


class _Tries:
    """What is left of the patience of one call."""

    __slots__ = ("_count", "_patience", "left_s")

    def __init__(self, patience: Patience) -> None:
        self.left_s = patience.total_s
        self._patience = patience
        self._count = 0

    async def pause(self, error: Exception, at_least_s: float = 0.0) -> None:
        """Wait before the next attempt; raises `error` where no time is left for one."""
        self._count += 1
        pause_s = 0.0
        if self._count > 1:
            doubled_s = self._patience.pause_s * 2.0 ** min(self._count - 2, 30)
            pause_s = min(doubled_s, self._patience.pause_max_s)
            pause_s *= 1 - self._patience.random() / 2
        pause_s = max(pause_s, at_least_s)
        if pause_s >= self.left_s:
            raise error
        self.left_s -= pause_s
        await anyio.sleep(pause_s)


@asynccontextmanager
async def connect(
    path: Path,
    *,
    framing: Framing = "lines",
    name: str = "recapd-client",
    version: str = "",
    token: str | None = None,
    reconnect: bool = True,
    wait_s: float = 0.0,
    patience: Patience | None = None,
    new_operation_id: Callable[[], str] = lambda: os.urandom(16).hex(),
) -> AsyncGenerator["Client"]:
    """A connection to the daemon that listens at `path`, for as long as the block runs.

    `wait_s`: how long to wait for a daemon that is only about to listen. Without `reconnect`,
    requests fail with ConnectionLost once the connection is lost. When the block ends, also by a
    cancel, what is still unsent goes out within half a second, then the connection is closed;
    nothing else is left behind.

    Raises NotConnected, BadAnswer, and RpcError where the server refuses the client
    (Unauthenticated, UnsupportedProtocol).
    """
    hello = m.InitializeParams(
        protocol=m.PROTOCOL_VERSION, client=m.ClientInfo(name, version), token=token
    )
    raised: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        client = Client(
            path, framing, hello, reconnect, patience or Patience(), new_operation_id, tasks
        )
        try:
            await client.connect(wait_s)
            yield client
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as error:
            raised = error  # the task group would put it into an ExceptionGroup
        finally:
            await client.close()
            tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised


class Client:
    """Made by `connect`. May be used by many tasks at once."""

    def __init__(
        self,
        path: Path,
        framing: Framing,
        hello: m.InitializeParams,
        reconnect: bool,
        patience: Patience,
        new_operation_id: Callable[[], str],
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self._path = path
        self._framing: Framing = framing
        self._hello = hello
        self._reconnect = reconnect
        self._patience = patience
        self._new_operation_id = new_operation_id
        self._tasks = tasks
        self._connecting = anyio.Lock()
        self._link: Link | None = None
        self._links: set[Link] = set()  # one, and while a server drains also the one before
        self._server: m.InitializeResult | None = None
        self._closed = False

    @property
    def server(self) -> m.InitializeResult:
        """What the server last said of itself: names, limits, principal."""
        assert self._server is not None  # `connect` gives the client away afterwards
        return self._server

    # Requests.

    @overload
    async def request(
        self, method: Literal["protocol.ping"], params: m.Params | None = None
    ) -> m.PingResult: ...
    @overload
    async def request(
        self, method: Literal["server.info"], params: m.Params | None = None
    ) -> m.InfoResult: ...
    @overload
    async def request(
        self, method: Literal["server.health"], params: m.Params | None = None
    ) -> m.HealthResult: ...
    @overload
    async def request(
        self, method: Literal["server.shutdown"], params: m.ShutdownParams | None = None
    ) -> m.ShutdownResult: ...
    @overload
    async def request(
        self, method: Literal["session.create"], params: m.CreateParams | None = None
    ) -> m.CreateResult: ...
    @overload
    async def request(
        self, method: Literal["session.list"], params: m.ListParams | None = None
    ) -> m.ListResult: ...
    @overload
    async def request(self, method: Literal["session.get"], params: m.GetParams) -> m.GetResult: ...
    @overload
    async def request(
        self, method: Literal["session.revisions"], params: m.SessionParams
    ) -> m.RevisionsResult: ...
    @overload
    async def request(
        self, method: Literal["session.append"], params: m.AppendParams
    ) -> m.AppendResult: ...
    @overload
    async def request(
        self, method: Literal["session.compact"], params: m.CompactParams
    ) -> m.CompactResult: ...
    @overload
    async def request(
        self, method: Literal["session.restore"], params: m.RestoreParams
    ) -> m.ReplaceResult: ...
    @overload
    async def request(
        self, method: Literal["session.rewind"], params: m.RewindParams
    ) -> m.ReplaceResult: ...
    @overload
    async def request(
        self, method: Literal["session.fork"], params: m.ForkParams
    ) -> m.SessionResult: ...
    @overload
    async def request(
        self, method: Literal["session.export"], params: m.ExportParams
    ) -> m.ExportResult: ...
    @overload
    async def request(
        self, method: Literal["session.update"], params: m.UpdateParams
    ) -> m.SessionResult: ...
    @overload
    async def request(
        self, method: Literal["session.verify"], params: m.VerifyParams
    ) -> m.VerifyResult: ...
    @overload
    async def request(
        self, method: Literal["session.delete"], params: m.DeleteParams
    ) -> m.DeleteResult: ...
    @overload
    async def request(
        self, method: Literal["session.events"], params: m.EventsParams
    ) -> m.EventsResult: ...
    @overload
    async def request(
        self, method: Literal["operation.get"], params: m.OperationGetParams
    ) -> m.OperationResult: ...
    @overload
    async def request(
        self, method: Literal["operation.cancel"], params: m.OperationParams
    ) -> m.CancelResult: ...
    @overload
    async def request(
        self, method: Literal["token.create"], params: m.TokenCreateParams
    ) -> m.TokenCreateResult: ...
    @overload
    async def request(
        self, method: Literal["token.list"], params: m.Params | None = None
    ) -> m.TokenListResult: ...
    @overload
    async def request(
        self, method: Literal["token.revoke"], params: m.TokenRevokeParams
    ) -> m.TokenRevokeResult: ...

    async def request(self, method: str, params: m.Params | None = None) -> Any:
        """Send a request and return its typed result; see the table in `methods.py` for both.

        A cancel cancels the request on the server, where it has not ended. Whether it took effect
        is then not known; what was given an operation id can be asked for with `operation.get`.

        Raises RpcError, NotConnected (nothing was sent), ConnectionLost, BadAnswer.
        """
        raw = await self.call(method, METHODS[method].params() if params is None else params)
        try:
            return _decoder(METHODS[method].result).decode(raw)
        except msgspec.DecodeError as error:
            raise BadAnswer from error

    async def call(
        self,
        method: str,
        params: msgspec.Struct | Mapping[str, object] | bytes | Raw | None = None,
    ) -> Raw:
        """The same for any method, with its result as the bytes that were sent.

        `params` may be the JSON text of an object, or hold JSON text as `msgspec.Raw`.
        """
        text, operation_id = self._encode(method, params)
        return await self._call(method, text, None, operation_id)

    def _encode(
        self, method: str, params: msgspec.Struct | Mapping[str, object] | bytes | Raw | None
    ) -> tuple[bytes, str | None]:
        """The parameters as JSON text, and the operation id of a change: new where it has none."""
        if method in _CHANGES and isinstance(params, m.MutationParams | m.CreateParams):
            if params.operation_id is None:
                params = msgspec.structs.replace(params, operation_id=self._new_operation_id())
            return _encode(params), params.operation_id
        text = bytes(params) if isinstance(params, bytes | Raw) else _encode(params or {})
        if method not in _CHANGES:
            return text, None
        try:
            members = msgspec.json.decode(text, type=dict[str, Raw])
            given = msgspec.json.decode(members.get("operation_id", b"null"), type=str | None)
        except (msgspec.DecodeError, RecursionError):
            return text, None  # the answer will say what is wrong with it
        if given is not None:
            return text, given
        operation_id = self._new_operation_id()
        return _encode(members | {"operation_id": Raw(_encode(operation_id))}), operation_id

    async def _call(
        self,
        method: str,
        params: bytes,
        on_answer: OnAnswer | None = None,
        operation_id: str | None = None,
    ) -> Raw:
        tries = _Tries(self._patience)
        lost: ConnectionLost | None = None
        asked_again = False
        while True:
            try:
                link = await self._ready(tries)
            except NotConnected as error:
                if lost is not None:
                    raise lost from error  # for it was sent before
                raise
            try:
                return await link.request(method, params, on_answer)
            except ConnectionLost as error:
                lost = ConnectionLost(operation_id)
                if method in _ONCE or not self._reconnect:
                    raise lost from error
                await tries.pause(lost)
            except ShuttingDown as error:
                if method in _ONCE or not self._reconnect:
                    raise
                if link is self._link:
                    self._link = None  # it still brings the answers and events that are under way
                await tries.pause(error)
            except Overloaded as error:
                await tries.pause(error, _retry_after_s(error))
            except OutcomeUnknown as error:
                if method not in _CHANGES or asked_again:
                    raise
                asked_again = True
                await tries.pause(error)

    # The connection.

    async def connect(self, wait_s: float) -> None:
        """Connect for the first time; see the function `connect`."""
        self._link = await self._open(_Tries(replace(self._patience, total_s=wait_s)))

    async def close(self) -> None:
        """Send what is waiting to be sent and close, in bounded time; requests under way fail."""
        self._closed = True
        for link in self._links:
            await link.close()

    async def _ready(self, tries: _Tries) -> Link:
        """The connection; a new one where it was lost, as long as the patience lasts."""
        if self._link is not None and self._link.alive:
            return self._link
        if self._closed or not self._reconnect:
            raise ConnectionLost
        left_s, begun_s = tries.left_s, anyio.current_time()
        try:
            with anyio.fail_after(left_s):
                async with self._connecting:  # whoever comes first connects for all
                    if self._link is None or not self._link.alive:
                        self._link = await self._open(tries)
                    return self._link
        except TimeoutError as error:
            raise NotConnected("the daemon could not be reached in time") from error
        finally:
            tries.left_s = left_s - (anyio.current_time() - begun_s)

    async def _open(self, tries: _Tries) -> Link:
        while True:
            try:
                link = await open_link(self._path, self._framing, self._hello)
                break
            except (NotConnected, Overloaded, ShuttingDown) as error:
                await tries.pause(error, _retry_after_s(error))
        known, self._server = self._server, link.hello
        try:
            if known is not None and known.server.store_id != link.hello.server.store_id:
                # Neither operation ids nor sequence numbers mean anything there.
                self._server = known
                raise NotConnected("another store is served at the socket now")
            await self._tasks.start(link.run)
        except BaseException:
            await link.abort()
            raise
        self._links = {one for one in self._links if not one.ended.is_set()} | {link}
        return link

    # What takes more than one request.

    async def pages(
        self,
        session_id: str,
        *,
        revision: int | None = None,
        order: Literal["asc", "desc"] = "asc",
        limit: int | None = None,
    ) -> AsyncGenerator[m.Entry]:
        """The entries of one history, fetched page by page: at most a page is held.

        `limit`: of a page. The history stays the one that it was at the first page, whatever
        happens to the session. Raises what `request` raises.
        """
        cursor: str | None = None
        while True:
            params = m.GetParams(
                session_id=session_id,
                revision=revision,
                order=order,
                limit=limit or 10_000,
                max_bytes=_PAGE_BYTES,
                cursor=cursor,
            )
            page = await self.request("session.get", params)
            if not isinstance(page.entries, list):
                raise BadAnswer
            for entry in page.entries:
                yield entry
            cursor = page.next_cursor
            if cursor is None:
                return

    def export(
        self,
        session_id: str,
        *,
        revision: int | Literal["current", "all"] = "current",
        format: m.Format = "jsonl",
        redact: m.Redact = "policy",
    ) -> "Export":
        """The text of an export, fetched chunk by chunk."""
        return Export(
            self,
            m.ExportParams(
                session_id=session_id,
                revision=revision,
                format=format,
                redact=redact,
                max_bytes=_PAGE_BYTES,
            ),
        )

    async def append_items(
        self, session_id: str, items: Iterable[bytes], *, expected_revision: int | None = None
    ) -> AsyncGenerator[m.AppendResult]:
        """Append any number of items in requests that keep to the server's limits.

        An item is its JSON text. Yields the result of each request: what was yielded is durable,
        and nothing behind it was sent. `expected_revision` is that before the first item; nobody
        may then come between the requests either.

        Raises what `request` raises; ItemTooLarge with the index in `items`.
        """
        for piece in _pieces(items, self.server.limits):
            result = await self.request(
                "session.append",
                m.AppendParams(
                    session_id=session_id, items=piece, expected_revision=expected_revision
                ),
            )
            if expected_revision is not None:
                expected_revision = result.session.revision
            yield result

    @asynccontextmanager
    async def subscribe(
        self,
        session_id: str | None = None,
        since: Since = "now",
        events: Sequence[m.EventName] | None = None,
    ) -> AsyncGenerator[Subscription]:
        """The events of one session, or of all: each once and in order, also over lost connections.

        `since`: events after this `seq` of the session, from now on, or from the start. `events`:
        only these. A `RESET` among the notices says that some may be missing.

        For all sessions `since="now"` goes by the server's clock where the connection is lost
        before a session's first event: those of the second before may come, too, and a session that
        is made and deleted meanwhile is not seen.

        Raises what `request` raises; so does the iteration.
        """
        subscription = Subscription(self._call_for_subscription, session_id, since, events)
        try:
            await subscription.begin()
            yield subscription
        finally:
            subscription.end()

    async def _call_for_subscription(
        self, method: str, params: m.Params, on_answer: OnAnswer | None
    ) -> Raw:
        return await self._call(method, _encode(params), on_answer)


class Export:
    """Iterate over it for the chunks, once. `manifest` is there after the last one."""

    def __init__(self, client: Client, params: m.ExportParams) -> None:
        self.manifest: m.Manifest | None = None
        self._client = client
        self._params = params

    async def __aiter__(self) -> AsyncIterator[str]:
        """Raises what `Client.request` raises."""
        params = self._params
        while True:
            answer = await self._client.request("session.export", params)
            yield answer.chunk
            if answer.done:
                self.manifest = None if answer.manifest is msgspec.UNSET else answer.manifest
                return
            params = msgspec.structs.replace(params, cursor=answer.next_cursor)


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[msgspec.Struct]:
    return msgspec.json.Decoder(kind)


def _pieces(items: Iterable[bytes], limits: m.Limits) -> Iterator[list[Raw]]:
    """As many items as one request may carry. Raises ItemTooLarge."""
    piece: list[Raw] = []
    piece_bytes = 0
    for index, item in enumerate(items):
        if len(item) > limits.item_bytes:
            raise ItemTooLarge(index=index, limit_bytes=limits.item_bytes)
        # An item of the greatest size still fits into a frame with its envelope, so this much does.
        if piece and (
            len(piece) == limits.items_per_append or piece_bytes + len(item) + 1 > limits.item_bytes
        ):
            yield piece
            piece, piece_bytes = [], 0
        piece.append(Raw(item))
        piece_bytes += len(item) + 1
    if piece:
        yield piece


def _retry_after_s(error: Exception) -> float:
    """What the server asked for; a bound is set by the patience."""
    asked_ms = error.data.get("retry_after_ms") if isinstance(error, RpcError) else None
    return asked_ms / 1000 if isinstance(asked_ms, int | float) and asked_ms > 0 else 0.0
