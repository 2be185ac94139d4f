"""What the providers' forms of asking and answering have in common: pure, no I/O.

A provider makes the body of a request and a `Reading`, which takes the answer, whole or event by
event, and says at the end what it was. Answers come from outside: no shape is relied on.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from recapd.protocol.items import is_array, is_object
from recapd.protocol.messages import Usage

Json = dict[str, Any]

Ending = Literal["complete", "cut_off", "tool_call", "refusal"]

_CODE = re.compile(r"[a-z][a-z_]{0,63}")  # a word for an error; no key or path has this shape
_TOO_LONG = re.compile(
    r"context[ _-]?(?:length|window|size|limit)|exceed_context_size|prompt is too long"
    r"|input is too long|too many (?:input |prompt )?tokens|maximum (?:model|input|sequence) length"
    r"|exceeds? the (?:available|maximum) context",
    re.IGNORECASE,
)
_TRANSIENT_CODES = frozenset(
    {
        *("rate_limit_exceeded", "rate_limit_error", "too_many_requests", "slow_down"),
        *("overloaded_error", "overloaded", "unavailable_error", "timeout_error"),
        *("server_error", "internal_server_error", "internal_error", "api_error"),
    }
)


class ProviderFailed(Exception):
    """An attempt gave no summary. `status` is a word of ours, `code` one of the provider's.

    `transient`: the same request may succeed later. `answered`: the provider did answer, and what
    it said is no summary. The text never holds what a provider said, which may repeat a key.
    """

    def __init__(
        self,
        status: str,
        *,
        provider_status: int | None = None,
        code: str | None = None,
        transient: bool = False,
        answered: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(status)
        self.status = status
        self.provider_status = provider_status
        self.code = code
        self.transient = transient
        self.answered = answered
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked: what it is to do, and the text that it is to do it with."""

    instructions: str
    content: str
    output_tokens_max: int
    word: str  # in every tag around what is quoted, and nowhere else


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said, and how it ended. `reasoning`: it also showed what it thought."""

    text: str
    ending: Ending
    reasoning: bool


class Reading(ABC):
    """Takes one answer. `usage` is what is known so far."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.reasoning = False
        self.ending: Ending | None = None  # None: it has not been said yet
        self.finished = False  # nothing of interest follows in the stream
        self.characters = 0  # of the text so far
        self._pieces: list[str] = []

    @abstractmethod
    def take(self, event: Json) -> None:
        """Take the JSON of one event of a stream.

        Raises:
            ProviderFailed: it reports an error.
        """

    @abstractmethod
    def take_whole(self, body: Json) -> None:
        """Take an answer that came in one piece.

        Raises:
            ProviderFailed: it reports an error.
        """

    def answer(self) -> Answer:
        """The answer.

        Raises:
            ProviderFailed: it has no end.
        """
        if self.ending is None:
            raise ProviderFailed(
                "interrupted", transient=not self._pieces, answered=bool(self._pieces)
            )
        return Answer("".join(self._pieces), self.ending, self.reasoning)

    def add(self, text: object) -> None:
        """Take a further piece of text; anything else is none."""
        if isinstance(text, str) and text:
            self._pieces.append(text)
            self.characters += len(text)

    def replace(self, pieces: list[str]) -> None:
        """Take the whole text instead of its pieces, unless it is empty."""
        if any(pieces):
            self._pieces = pieces
            self.characters = sum(map(len, pieces))

    def end(self, ending: Ending) -> None:
        """Note how it ended; a call of a tool or a refusal outweighs what is said later."""
        if self.ending in (None, "complete", "cut_off"):
            self.ending = ending


class Provider(Protocol):
    """One form of asking and answering."""

    name: ClassVar[str]
    path: ClassVar[str]  # below the base URL

    def headers(self, key: str) -> dict[str, str]:
        """What shows the key."""
        ...

    def body(self, model: str, prompt: Prompt, *, stream: bool) -> Json:
        """The body of a request. All of it is inline: nothing is kept at the provider (B77)."""
        ...

    def reading(self) -> Reading:
        """What takes the answer."""
        ...


def reported(error: object, *, text_came: bool = False) -> ProviderFailed:
    """The failure that the `error` of a body or an event with status 200 stands for."""
    code = error_code(error)
    if tells_too_long(error):
        return ProviderFailed("context_length_exceeded", code=code)
    transient = code in _TRANSIENT_CODES and not text_came
    return ProviderFailed("provider_error", code=code, transient=transient, answered=True)


def error_code(error: object) -> str | None:
    """The provider's word for an error: `code` or `type`, where it is a word."""
    if is_object(error):
        for word in (error.get("code"), error.get("type")):
            if isinstance(word, str) and _CODE.fullmatch(word) and word != "error":
                return word
    return None


def tells_too_long(error: object) -> bool:
    """Whether an error says that the request is longer than the model's window.

    OpenAI and llama.cpp have a code for it, vLLM, Anthropic and others only a sentence.
    """
    if is_object(error):
        return any(tells_too_long(error.get(name)) for name in ("code", "type", "message", "error"))
    return isinstance(error, str) and _TOO_LONG.search(error) is not None


def member(value: object, *names: str) -> Any:
    """`value[name][name]…`, None where there is no such member."""
    for name in names:
        value = value.get(name) if is_object(value) else None
    return value


def object_member(value: object, name: str) -> Json:
    """`value[name]` where it is an object, an empty one otherwise."""
    found = member(value, name)
    return found if is_object(found) else {}


def objects(value: object) -> Iterator[Json]:
    """The objects in an array; none where it is none."""
    if is_array(value):
        yield from (element for element in value if is_object(element))


def tokens(value: object) -> int | None:
    """A number of tokens, None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
