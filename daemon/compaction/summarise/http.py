"""Asking a provider over HTTP: attempts, their limits in time and size, and when to try again.

A request is tried again where the transport failed, or the status was 408, 409, 429 or 5xx, and no
text had come; after a pause, or as long as `Retry-After` says, within the deadline. Nothing is
stored, and no answer is given twice. This is the only module that knows
of httpx and stamina.
"""

import email.utils
import ssl
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeVar

import anyio
import anyio.to_thread
import httpx
import msgspec
import stamina

import recapd
from recapd.daemon.compaction.summarise.keys import Key
from recapd.daemon.compaction.summarise.provider import (
    Answer,
    Json,
    Prompt,
    Provider,
    ProviderFailed,
    Reading,
    error_code,
    tells_too_long,
)
from recapd.daemon.compaction.summarise.settings import OnlineSettings
from recapd.daemon.compaction.summarise.sse import EventParser
from recapd.protocol.items import is_object
from recapd.protocol.messages import Attempt

T = TypeVar("T")

ATTEMPTS_MAX: Final = 5
"""Of a request: with the pauses below, the last comes 7 to 10 s after the first."""

_PAUSE_S: Final = 0.5  # before the second attempt, doubled before each further one, and some chance
_PAUSE_S_MAX: Final = 8.0
_CONNECT_TIMEOUT_S: Final = 10.0
_ANSWER_BYTES: Final = 1 << 20  # of an answer that says nothing, with its head and its pings
_TOKEN_BYTES: Final = 2_048  # of one token in a stream: an event of a few hundred, said twice
_ERROR_BYTES: Final = 1 << 16  # of an error's body
_LINGER_S: Final = 0.5  # for the end of a body after all that is of interest
_FOREVER_S: Final = 1e9  # so long that no deadline is longer

_STATUSES: Final = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    408: "request_timeout",
    409: "conflict",
    413: "request_too_large",
    429: "rate_limited",
}
_TRANSIENT: Final = frozenset({408, 409, 429, *range(500, 600)})
_USED_UP: Final = frozenset({"insufficient_quota", "billing_hard_limit_reached"})

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(float_hook=str).decode


class Caller:
    """Asks one provider, over connections that are closed when its context ends.

    `attempts` has every attempt so far. Making one takes about 20 ms: not for the event loop.
    """

    def __init__(
        self,
        provider: Provider,
        settings: OnlineSettings,
        key: Key | None,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.attempts: list[Attempt] = []
        self._provider = provider
        self._settings = settings
        self._url = f"{settings.base_url}/{provider.path}"
        self._headers = {
            "Accept": "text/event-stream, application/json"
            if settings.stream
            else "application/json",
            "Accept-Encoding": "identity",  # so that the size of an answer is what comes in
            "Content-Type": "application/json",
            "User-Agent": f"recapd/{recapd.__version__}",
        }
        if key is not None:
            self._headers |= provider.headers(key.reveal())
        encrypted = settings.base_url.startswith("https:")
        self._client = httpx.AsyncClient(
            transport=transport,
            verify=ssl.create_default_context() if encrypted else False,
            trust_env=not settings.is_local,  # for proxies
            follow_redirects=False,  # a key goes to no other host
            timeout=httpx.Timeout(
                settings.attempt_timeout_s,
                connect=min(_CONNECT_TIMEOUT_S, settings.attempt_timeout_s),
            ),
        )

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._client.__aexit__(kind, error, traceback)

    async def ask(
        self,
        prompt: Prompt,
        judge: Callable[[Answer], T],
        heard: Callable[[int], None],
    ) -> T:
        """What `judge` makes of the answer, in a thread. `heard` is told how many characters came.

        Raises:
            ProviderFailed: there is no answer that `judge` takes.
        """
        body = _encode(
            self._provider.body(self._settings.model, prompt, stream=self._settings.stream)
        )
        deadline_s = anyio.current_time() + self._settings.deadline_s

        def again(error: Exception) -> bool | float:
            """Whether there is to be another attempt, or after how many seconds."""
            if not isinstance(error, ProviderFailed) or not error.transient:
                return False
            pause_s = error.retry_after_s
            if pause_s is None:
                return True
            return anyio.current_time() + pause_s < deadline_s and pause_s

        retries = stamina.retry_context(
            again,
            attempts=ATTEMPTS_MAX,
            timeout=None,  # the deadline ends a pause, too
            wait_initial=_PAUSE_S,
            wait_max=_PAUSE_S_MAX,
            wait_jitter=_PAUSE_S,
        )
        with anyio.CancelScope(deadline=deadline_s):
            async for attempt in retries:
                with attempt:
                    return await self._attempt(body, prompt, judge, heard, deadline_s)
        last = self.attempts[-1] if self.attempts else None
        raise ProviderFailed(
            "deadline", provider_status=last.provider_status if last else None, transient=True
        )

    async def _attempt(
        self,
        body: bytes,
        prompt: Prompt,
        judge: Callable[[Answer], T],
        heard: Callable[[int], None],
        deadline_s: float,
    ) -> T:
        started_s = anyio.current_time()
        reading = self._provider.reading()
        status: str | None = None
        provider_status: int | None = None
        code: str | None = None
        try:
            try:
                request = self._client.stream(
                    "POST", self._url, content=body, headers=self._headers
                )
                async with request as response:
                    provider_status = response.status_code
                    if not response.is_success:
                        raise await self._refusal(response)
                    await self._read(response, reading, prompt, heard)
            except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
                if reading.ending is None:  # otherwise all had been said
                    raise _broken(error, reading) from error
            # Counting tokens takes a second where an answer is one letter again and again.
            result = await anyio.to_thread.run_sync(judge, reading.answer())
            status = "ok"
            return result
        except ProviderFailed as failure:
            status, code = failure.status, failure.code
            failure.provider_status = provider_status
            raise
        finally:
            now_s = anyio.current_time()
            self.attempts.append(
                Attempt(
                    self._provider.name,
                    status or ("deadline" if now_s >= deadline_s else "cancelled"),
                    provider_status,
                    code,
                    round((now_s - started_s) * 1000),
                    reading.usage,
                )
            )

    async def _read(
        self,
        response: httpx.Response,
        reading: Reading,
        prompt: Prompt,
        heard: Callable[[int], None],
    ) -> None:
        room = _ANSWER_BYTES + _TOKEN_BYTES * prompt.output_tokens_max
        kind = response.headers.get("content-type", "")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ProviderFailed("malformed", answered=True)
        # A server may not know of streams, and another not say that it streams.
        if "json" in kind or not (self._settings.stream or "event-stream" in kind):
            reading.take_whole(_object(await _bounded(response, room)))
            return
        events = EventParser()

        def take(piece: bytes) -> bool:
            for event in events.feed(piece):
                if event.data == b"[DONE]":
                    reading.finished = True
                elif event.data and not reading.finished:
                    reading.take(_object(event.data))
            heard(reading.characters)
            return reading.finished

        await _pass_on(response, room, take)

    async def _refusal(self, response: httpx.Response) -> ProviderFailed:
        """What a status other than 2xx means."""
        number = response.status_code
        error: object = None
        try:
            error = _object(await _bounded(response, _ERROR_BYTES))
        except (ProviderFailed, httpx.HTTPError):
            pass  # the status says enough
        if is_object(error) and "error" in error:
            error = error["error"]
        code = error_code(error)
        if number not in (401, 403, 404, 429) and tells_too_long(error):
            return ProviderFailed("context_length_exceeded", code=code)
        status = _STATUSES.get(number)
        if status is None:
            status = "server_error" if number >= 500 else "bad_request"
            status = "redirect" if 300 <= number < 400 else status
        return ProviderFailed(
            status,
            code=code,
            transient=number in _TRANSIENT and code not in _USED_UP,
            retry_after_s=retry_after_s(response.headers.get("retry-after", ""), time.time()),
        )


def retry_after_s(value: str, now_s: float) -> float | None:
    """`Retry-After` in seconds (RFC 9110 §10.2.3); None where it says nothing useful.

    `now_s` is the time since the epoch.
    """
    value = value.strip()
    if value.isascii() and value.isdigit():
        return min(float(value), _FOREVER_S)
    try:
        at_s = email.utils.parsedate_to_datetime(value).timestamp()
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return at_s - now_s if at_s >= now_s else None


def _broken(error: Exception, reading: Reading) -> ProviderFailed:
    status = "timeout" if isinstance(error, httpx.TimeoutException) else "connection"
    transient = isinstance(error, httpx.TransportError) and not isinstance(
        error, httpx.UnsupportedProtocol
    )
    text_came = reading.characters > 0
    return ProviderFailed(status, transient=transient and not text_came, answered=text_came)


async def _bounded(response: httpx.Response, room: int) -> bytes:
    pieces: list[bytes] = []

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return False

    await _pass_on(response, room, take)
    return b"".join(pieces)


async def _pass_on(response: httpx.Response, room: int, take: Callable[[bytes], bool]) -> None:
    """Give `take` the pieces of a body until it has enough of them, or raises ProviderFailed.

    `room` is in bytes; more of them are a ProviderFailed. Behind the last piece the end is not
    waited for longer than `_LINGER_S`, but it is waited for: then the connection can be used again.
    A body is left by a cancel, the one thing that ends all of httpx's nested generators at once.
    """
    failure: ProviderFailed | None = None
    enough = False
    with anyio.CancelScope() as scope:
        async for piece in response.aiter_raw():
            room -= len(piece)
            if failure is not None or (enough and room >= 0):
                continue
            try:
                if room < 0:
                    raise ProviderFailed("answer_too_large", answered=True)
                enough = take(piece)
            except ProviderFailed as error:
                failure = error
                scope.cancel()
            if enough:
                scope.deadline = anyio.current_time() + _LINGER_S
    if failure is not None:
        raise failure


def _object(text: bytes) -> Json:
    try:
        value = _decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ProviderFailed("malformed", answered=True) from error
    if not is_object(value):
        raise ProviderFailed("malformed", answered=True)
    return value
