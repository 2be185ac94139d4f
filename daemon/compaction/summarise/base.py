"""What every summariser is, reads and gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from recapd.protocol.errors import CompactionFailed
from recapd.protocol.messages import Attempt
from recapd.storage.entry import Entry

SUMMARY_CHARACTERS_MAX = 8_000
"""Of an offline summary: about 2 000 tokens of English or code, a tenth of the context limit."""

Quality = Literal["model", "chunked", "offline", "client"]
"""A model in one request, or in several that continue each other; shortened; the client's own."""


def _tell_nobody(done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Source:
    """What a summariser may read. Instructions and reminders stay in the history; the body goes."""

    instructions: tuple[Entry, ...] = ()
    reminders: tuple[Entry, ...] = ()
    body: tuple[Entry, ...] = ()
    characters_max: int = SUMMARY_CHARACTERS_MAX  # a bound offline, a wish where a model is asked
    redact: Callable[[str], str] = str  # what each rendered block must go through first
    progress: Callable[[int, int], None] = _tell_nobody  # done and total, in characters of answers


@dataclass(frozen=True, slots=True)
class Summary:
    """The text in place of the body, how it came about, and every attempt to ask a model for it."""

    text: str
    quality: Quality
    attempts: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """What a provider is going to be sent: the body as JSON, without the key."""

    provider: str
    body: bytes


class Summariser(Protocol):
    """Makes a summary."""

    async def first_request(self, source: Source) -> Request | None:
        """The first request that a summary of `source` takes; None where no model is asked."""
        return None

    async def __call__(self, source: Source) -> Summary:
        """The summary of `source`. A cancel leaves nothing open.

        Raises:
            CompactionFailed: there is none, `attempts` says what was tried; a lesser one never
                takes its place.
        """
        ...


def accept(text: str) -> str:
    """The summary `text` without white space around it.

    Raises:
        CompactionFailed: it is blank, or has a lone surrogate, which is not text (stage `accept`).
    """
    text = text.strip()
    if not text:
        raise CompactionFailed(stage="accept", hint="The summary is empty.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CompactionFailed(stage="accept", hint="The summary is not valid Unicode.") from error
    return text
