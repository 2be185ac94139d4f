"""When a request is made again, and how long after (B76), without a network."""

import email.utils
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any

import anyio
import httpx
import msgspec
import pytest
import stamina
from stamina.instrumentation import RetryDetails, set_on_retry_hooks

from recapd.daemon.compaction.summarise.base import Source, Summary
from recapd.daemon.compaction.summarise.http import ATTEMPTS_MAX, Caller, retry_after_s
from recapd.daemon.compaction.summarise.keys import Key
from recapd.daemon.compaction.summarise.online import OnlineSummariser
from recapd.daemon.compaction.summarise.provider import Provider
from recapd.daemon.compaction.summarise.settings import OnlineSettings
from recapd.protocol.errors import CompactionFailed
from recapd.storage.entry import Entry

NOW_S = 1_800_000_000.0
GOOD = {"choices": [{"message": {"content": "fine"}, "finish_reason": "stop"}]}
SOURCE = Source(body=(Entry(1, 0, msgspec.json.encode({"role": "user", "content": "why? " * 50})),))

Answer = httpx.Response | Exception


class Run:
    """A summary of `SOURCE`; each request gets the next of `answers`, the last again and again."""

    def __init__(self, *answers: Callable[[], Answer], **settings: Any) -> None:
        self.answers = answers
        self.requests: list[httpx.Request] = []
        self.settings = OnlineSettings(
            kind="chat", model="m", base_url="http://model.test/v1", deadline_s=60, **settings
        )

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def caller(self, provider: Provider, settings: OnlineSettings, key: Key | None) -> Caller:
        return Caller(
            provider,
            settings,
            key,
            transport=httpx.MockTransport(self.answer),
        )

    async def summary(self) -> Summary:
        return await OnlineSummariser(self.settings.checked(), make_caller=self.caller)(SOURCE)

    async def failure(self) -> CompactionFailed:
        with pytest.raises(CompactionFailed) as caught:
            await self.summary()
        return caught.value


async def body_of(value: object) -> AsyncGenerator[bytes]:
    yield msgspec.json.encode(value)


def answer_of(number: int, value: object, **headers: str) -> httpx.Response:
    """A response that has not been read."""
    headers["content-type"] = "application/json"
    raw = [(name.encode(), text.encode()) for name, text in headers.items()]
    return httpx.Response(number, headers=raw, content=body_of(value))


def status(number: int, retry_after: str | None = None, **error: str) -> Callable[[], Answer]:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return lambda: answer_of(number, {"error": error}, **headers)


def good() -> Answer:
    return answer_of(200, GOOD)


@pytest.fixture
def no_pauses() -> Generator[None]:
    with stamina.set_testing(True, attempts=ATTEMPTS_MAX, cap=True):
        yield


@pytest.mark.parametrize(
    ("value", "pause_s"),
    [
        ("1", 1.0),
        ("0", 0.0),
        (email.utils.formatdate(NOW_S + 7, usegmt=True), 7.0),
        (email.utils.formatdate(NOW_S - 7, usegmt=True), None),
        ("-5", None),
        ("soon", None),
        ("", None),
        ("1.5e3", None),
        ("\u0661", None),
    ],
)
def test_what_a_provider_says_about_a_pause(value: str, pause_s: float | None) -> None:
    """RFC 9110 §10.2.3; odd values leave it to us."""
    assert retry_after_s(value, NOW_S) == pause_s


@pytest.mark.parametrize(
    ("retry_after", "least_s", "most_s"), [("7", 7, 7), ("0", 0, 0), (None, 0.5, 1)]
)
async def test_a_pause_is_as_long_as_the_provider_says(
    retry_after: str | None, least_s: float, most_s: float
) -> None:
    pauses: list[float] = []

    def pause(details: RetryDetails) -> None:
        pauses.append(details.wait_for)
        scope.cancel()

    set_on_retry_hooks([pause])
    try:
        with anyio.CancelScope() as scope:
            await Run(status(429, retry_after), good).summary()
    finally:
        set_on_retry_hooks(None)
    (pause_s,) = pauses
    assert least_s <= pause_s <= most_s


@pytest.mark.parametrize("value", ["86400", "9" * 400, "61"])
async def test_a_pause_longer_than_the_deadline_gives_up_at_once(value: str) -> None:
    error = await Run(status(429, value)).failure()
    assert error.retryable
    assert (error.data["provider_status"], error.attempts[0].status) == (429, "rate_limited")
    assert (len(error.attempts), error.data["retry_after_ms"] >= 61_000) == (1, True)


@pytest.mark.usefixtures("no_pauses")
async def test_attempts_are_bounded() -> None:
    error = await Run(status(503)).failure()
    assert [attempt.status for attempt in error.attempts] == ["server_error"] * ATTEMPTS_MAX
    assert error.retryable


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("number", [408, 409, 429, 500, 502, 503, 529])
async def test_what_may_pass_is_tried_again(number: int) -> None:
    assert (await Run(status(number), good).summary()).text == "fine"


@pytest.mark.parametrize("number", [301, 400, 401, 402, 403, 404, 413, 422])
async def test_what_will_not_pass_is_not(number: int) -> None:
    run = Run(status(number, "1"))
    assert not (await run.failure()).retryable
    assert len(run.requests) == 1


async def test_an_account_that_is_used_up_is_not_waited_for() -> None:
    run = Run(status(429, code="insufficient_quota"))
    error = await run.failure()
    assert [attempt.provider_code for attempt in error.attempts] == ["insufficient_quota"]


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    "failure",
    [httpx.ConnectError, httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError],
)
async def test_a_transport_that_fails_is_tried_again(failure: type[httpx.TransportError]) -> None:
    run = Run(lambda: failure("refused by 10.0.0.1"), good)
    assert (await run.summary()).text == "fine"


@pytest.mark.usefixtures("no_pauses")
async def test_a_failure_of_the_transport_does_not_tell_addresses() -> None:
    error = await Run(lambda: httpx.ConnectError("no route to 10.0.0.1")).failure()
    assert "10.0.0.1" not in str(error.to_wire())
    assert len(error.attempts) == ATTEMPTS_MAX


async def test_the_key_is_in_its_header_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", " s3cret-key \n")
    run = Run(status(401, message="bad key s3cret-key"), key_env="SOME_KEY")
    error = await run.failure()
    assert run.requests[0].headers["authorization"] == "Bearer s3cret-key"
    chain: list[BaseException] = list(_causes(error))
    assert len(chain) > 1
    assert "s3cret" not in "".join(repr(one) for one in chain) + str(error.to_wire())


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
