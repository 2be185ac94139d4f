"""The summary that a model makes: one request, or several that continue each other.

::

    source → blocks → piece, note so far ─► prompt ─► model ─► accepted? ─► note … ─► summary
                         ▲                               │ no: once again, with the reason
                         └── smaller, if too long ───────┘

The size of every request is known before it is sent. A model's window counts tokens of its own
kind, so what is counted here has a margin; and where the provider still says that it is too long,
the margin grows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import anyio.from_thread
import anyio.to_thread
import msgspec

from recapd.daemon.compaction.relevance import GROUP_TOKENS_MAX, relevant
from recapd.daemon.compaction.summarise.acceptance import accepted, graded
from recapd.daemon.compaction.summarise.anthropic import Anthropic
from recapd.daemon.compaction.summarise.base import Request, Source, Summariser, Summary
from recapd.daemon.compaction.summarise.chat import Chat
from recapd.daemon.compaction.summarise.chunks import (
    TOKEN_CHARACTERS_MAX,
    Block,
    Transcript,
    block,
    read_blocks,
    shorten_to_tokens,
)
from recapd.daemon.compaction.summarise.keys import Key, read_key
from recapd.daemon.compaction.summarise.offline import NOTHING
from recapd.daemon.compaction.summarise.prompt import Context, grading_prompt, summary_prompt
from recapd.daemon.compaction.summarise.provider import Answer, Prompt, Provider, ProviderFailed
from recapd.daemon.compaction.summarise.responses import Responses
from recapd.daemon.compaction.summarise.settings import Kind, OnlineSettings
from recapd.daemon.compaction.tokens import count_tokens
from recapd.protocol.errors import CompactionFailed
from recapd.protocol.messages import Attempt
from recapd.storage.entry import Entry

if TYPE_CHECKING:
    from recapd.daemon.compaction.summarise.http import Caller

T = TypeVar("T")

MARGIN: Final = 0.9
"""Of the window that is used: other models count up to a fifth more tokens than are counted here,
and the output is seldom used up."""

SHRINKAGE: Final = 0.7
SHRINKAGES_MAX: Final = 8
"""How often a window turns out to be too small: 0.7⁸ is a seventeenth of it."""

PIECE_TOKENS_MIN: Final = 200
"""Of a request: less than that is no progress."""

_TAG_TOKENS: Final = 60  # around a group that is graded

_QUARTER, _EIGHTH = 4, 8  # of a request: for the note; for policy, for reminders and for focus

PROVIDERS: Final[Mapping[Kind, type[Provider]]] = {
    "responses": Responses,
    "chat": Chat,
    "anthropic": Anthropic,
}

_BROKEN: Final = frozenset({"timeout", "connection", "interrupted"})  # behind the first text, too

_HINTS: Final = {
    "unauthorized": "The provider did not take the key.",
    "forbidden": "The key may not use this model.",
    "not_found": "The provider does not know the model or the path: check model and base_url.",
    "bad_request": "The provider did not take the request: check model and output_tokens_max.",
    "redirect": "The provider is elsewhere: check base_url.",
    "request_too_large": "The request is too large for the provider: set a smaller window_tokens.",
    "context_length_exceeded": "The model's window is smaller than window_tokens says.",
    "window_too_small": "Too little of window_tokens is left for the transcript.",
    "server_error": "The provider has a fault.",
    "provider_error": "The provider reported an error.",
    "interrupted": "The answer ended without its end.",
    "answer_too_large": "The answer is longer than output_tokens_max could be.",
    "rate_limited": "The provider limits how often it is asked, or the account is used up.",
    "connection": "The provider could not be reached, or broke off: check base_url.",
    "timeout": "Nothing came within attempt_timeout_s.",
    "deadline": "The answer was not complete within deadline_s.",
    "malformed": "What came is no answer of this kind of provider: check base_url.",
    "cut_off": "The answer was cut off: set a greater output_tokens_max.",
    "empty": "The model answered without text.",
    "only_reasoning": "The model only reasoned: set a greater output_tokens_max.",
    "tool_call": "The model called a tool.",
    "refusal": "The model refused.",
    "repeats_prompt": "The model repeated what it was told.",
    "too_long": "The model's summary is too long for its source.",
}


def _make_caller(provider: Provider, settings: OnlineSettings, key: Key | None) -> "Caller":
    from recapd.daemon.compaction.summarise.http import Caller  # with httpx, 100 ms

    return Caller(provider, settings, key)


@dataclass(frozen=True, slots=True)
class OnlineSummariser(Summariser):
    """Asks a model. `focus` is what the caller wants it to look at most.

    `threshold` is the grade from which on a group is relevant; None: all are, and none is graded.
    """

    settings: OnlineSettings
    focus: str = ""
    threshold: float | None = None
    make_caller: Callable[[Provider, OnlineSettings, Key | None], "Caller"] = _make_caller

    async def __call__(self, source: Source) -> Summary:
        if not source.body:
            return Summary(NOTHING, "offline")  # nothing is there that a model could be asked about
        provider = self._provider()
        key = await read_key(self.settings)
        caller = await anyio.to_thread.run_sync(self.make_caller, provider, self.settings, key)
        async with caller:
            try:
                return await _Work(self, source, caller).summary()
            except ProviderFailed as failure:
                raise _failed(failure, caller) from failure

    async def first_request(self, source: Source) -> Request | None:
        """Likewise, without a key, and with nobody asked.

        Raises:
            CompactionFailed: a request would be too long.
        """
        listener = _Listener()
        try:
            await _Work(self, source, listener).summary()
        except _Asked as asked:
            provider = self._provider()
            body = provider.body(self.settings.model, asked.prompt, stream=self.settings.stream)
            return Request(provider.name, msgspec.json.encode(body))
        except ProviderFailed as failure:
            raise _failed(failure, listener) from failure
        return None  # there is nothing to summarise

    def _provider(self) -> Provider:
        return PROVIDERS[self.settings.kind]()


class _Caller(Protocol):
    """Whom a summary asks: `http.Caller`, or who only takes down what it would be asked."""

    attempts: list[Attempt]

    async def ask(
        self, prompt: Prompt, judge: Callable[[Answer], T], heard: Callable[[int], None]
    ) -> T: ...


class _Asked(Exception):
    """There was a request with this prompt."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__()
        self.prompt = prompt


class _Listener(_Caller):
    """Ends with the first request."""

    def __init__(self) -> None:
        self.attempts = []

    async def ask(
        self, prompt: Prompt, judge: Callable[[Answer], T], heard: Callable[[int], None]
    ) -> T:
        raise _Asked(prompt)


class _Work:
    """The summary of one source."""

    def __init__(self, asked: OnlineSummariser, source: Source, caller: _Caller) -> None:
        self._settings = asked.settings
        self._focus = source.redact(asked.focus)
        self._threshold = asked.threshold
        self._source = source
        self._caller = caller
        self._policy = self._reminders = ""
        self._share = MARGIN  # of the window
        self._pieces = 0  # that have been summarised

    async def summary(self) -> Summary:
        source = self._source
        entries, blocks = source.body, await self._read(source.body)
        if self._threshold is not None:
            kept = await self._relevant(blocks, self._threshold)
            entries = tuple(entries[position] for position in kept)
            blocks = [blocks[position] for position in kept]
        self._policy = _joined(await self._read(source.instructions))
        self._reminders = _joined(await self._read(source.reminders))
        transcript = await anyio.to_thread.run_sync(Transcript, entries, blocks)
        note, start, shrinkages = "", 0, 0
        while start < len(transcript):
            try:
                note, start = await self._go_on(transcript, start, note)
                self._pieces += 1
            except ProviderFailed as failure:
                shrinkages += 1
                if failure.status != "context_length_exceeded" or shrinkages > SHRINKAGES_MAX:
                    raise
                self._share *= SHRINKAGE
        return Summary(
            note, "model" if self._pieces == 1 else "chunked", tuple(self._caller.attempts)
        )

    async def _read(self, entries: tuple[Entry, ...]) -> list[Block]:
        return await anyio.to_thread.run_sync(
            read_blocks,
            entries,
            self._source.redact,
            self._settings.window_tokens * TOKEN_CHARACTERS_MAX,
            anyio.from_thread.check_cancelled,
        )

    async def _relevant(self, blocks: list[Block], threshold: float) -> list[int]:
        """The positions of what is worth summarising."""
        window_tokens = int(self._settings.window_tokens * self._share)
        output_tokens_max = min(self._settings.output_tokens_max, window_tokens // _QUARTER)
        focus = await anyio.to_thread.run_sync(
            shorten_to_tokens, self._focus, window_tokens // _EIGHTH
        )
        make_prompt = partial(grading_prompt, focus=focus, output_tokens_max=output_tokens_max)
        empty = await anyio.to_thread.run_sync(_size, make_prompt([(0, "")]))

        def show(positions: Sequence[int]) -> tuple[str, int]:
            text = shorten_to_tokens(
                "\n\n".join(blocks[position].text for position in positions), GROUP_TOKENS_MAX
            )
            return text, count_tokens(text).count + _TAG_TOKENS

        async def grade(parts: Sequence[tuple[int, str]]) -> Mapping[int, float] | None:
            try:
                return await self._caller.ask(make_prompt(parts), graded, lambda characters: None)
            except ProviderFailed:
                return None  # the attempt is in the log, and all of them count as relevant

        return await relevant(
            self._source.body,
            show,
            grade,
            threshold=threshold,
            batch_tokens_max=window_tokens - output_tokens_max - empty,
        )

    async def _go_on(self, transcript: Transcript, start: int, note: str) -> tuple[str, int]:
        """The note about one piece more, and where the transcript goes on."""
        window_tokens = int(self._settings.window_tokens * self._share)
        output_tokens_max = min(self._settings.output_tokens_max, window_tokens // _QUARTER)
        input_tokens = window_tokens - output_tokens_max
        context, so_far = await anyio.to_thread.run_sync(self._context, input_tokens, note)
        make_prompt = partial(
            summary_prompt, context=context, so_far=so_far.text, output_tokens_max=output_tokens_max
        )
        empty = make_prompt([" "], characters_max=1, repair="repeats_prompt")
        room = input_tokens - await anyio.to_thread.run_sync(_size, empty)
        if room < PIECE_TOKENS_MIN:
            raise ProviderFailed("window_too_small")
        piece = await anyio.to_thread.run_sync(transcript.take, start, room)
        parts = self._pieces + 1 + -(-piece.tokens_left // room)
        characters = sum(map(len, piece.texts)) + len(so_far.text)
        make_prompt = partial(
            make_prompt,
            piece.texts,
            part=(self._pieces + 1, parts),
            characters_max=min(self._source.characters_max, characters // 2),
        )
        source_tokens = piece.tokens + (so_far.tokens if so_far.text else 0)
        return await self._ask(make_prompt, source_tokens, parts), piece.stop

    async def _ask(self, make_prompt: Callable[..., Prompt], source_tokens: int, parts: int) -> str:
        """The accepted answer, the second one if need be."""
        expected = self._source.characters_max

        def heard(characters: int) -> None:
            done = self._pieces * expected + min(characters, expected)
            self._source.progress(done, parts * expected)

        repair = ""
        while True:
            prompt = make_prompt(repair=repair)
            judge = partial(accepted, prompt=prompt, source_tokens=source_tokens)
            try:
                answer = await self._caller.ask(prompt, judge, heard)
                heard(expected)
                return answer
            except ProviderFailed as failure:
                if repair or not failure.answered:
                    raise
                repair = failure.status

    def _context(self, input_tokens: int, note: str) -> tuple[Context, Block]:
        """What goes along with every piece, shortened to its share."""
        eighth = input_tokens // _EIGHTH
        context = Context(
            shorten_to_tokens(self._policy, eighth),
            shorten_to_tokens(self._reminders, eighth),
            shorten_to_tokens(self._focus, eighth),
        )
        return context, block(shorten_to_tokens(note, input_tokens // _QUARTER))


def _size(prompt: Prompt) -> int:
    return count_tokens(f"{prompt.instructions}\n{prompt.content}").count


def _joined(blocks: list[Block]) -> str:
    return "\n\n".join(one.text for one in blocks)


def _failed(failure: ProviderFailed, caller: _Caller) -> CompactionFailed:
    retry_after_s = failure.retry_after_s
    return CompactionFailed(
        stage="accept" if failure.answered and failure.status not in _BROKEN else "summarise",
        provider_status=failure.provider_status,
        retryable=failure.transient,
        retry_after_ms=None if retry_after_s is None else round(retry_after_s * 1000),
        hint=_HINTS.get(failure.status),
        attempt_log=caller.attempts,
    )
