"""Summarisers: from what a compaction takes away to the text in its place (PROTOCOL.md §5.2)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import anyio.to_thread

from recapd.daemon.compaction.partition import is_only_reminder
from recapd.daemon.compaction.transcript import render, shorten, spaced
from recapd.protocol.errors import CompactionFailed
from recapd.protocol.items import Role, item_facts
from recapd.storage.entry import Entry

SUMMARY_CHARACTERS_MAX = 8_000
"""Of an offline summary: about 2 000 tokens of English or code, a tenth of the context limit."""

NOTHING = "There was nothing to summarise."

_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Source:
    """What a summariser may read. Instructions and reminders stay in the history; the body goes."""

    instructions: tuple[Entry, ...] = ()
    reminders: tuple[Entry, ...] = ()
    body: tuple[Entry, ...] = ()
    characters_max: int = SUMMARY_CHARACTERS_MAX  # a bound offline, a wish where a model is asked
    redact: Callable[[str], str] = str  # what each rendered block must go through first


class Summariser(Protocol):
    """Makes a summary of a kind, its `quality`, that the client is told."""

    @property
    def quality(self) -> str: ...

    async def __call__(self, source: Source) -> str:
        """The summary of `source`.

        Raises:
            CompactionFailed: there is none; a lesser one never takes its place.
        """
        ...


class OfflineSummariser(Summariser):
    """Shortens the transcript (`offline_summary`): nothing leaves the process."""

    @property
    def quality(self) -> str:
        return "offline"

    async def __call__(self, source: Source) -> str:
        # In a thread, for an item may have 16 MiB; it reads few, so a cancel does not wait long.
        return await anyio.to_thread.run_sync(offline_summary, source)


@dataclass(frozen=True, slots=True)
class GivenSummary(Summariser):
    """Hands over a summary that the client wrote."""

    text: str

    @property
    def quality(self) -> str:
        return "client"

    async def __call__(self, source: Source) -> str:
        return self.text


def given_summary(text: str) -> GivenSummary:
    """A summariser that hands over `text`.

    Raises:
        CompactionFailed: `text` cannot be a summary (stage `accept`).
    """
    return GivenSummary(accept(text))


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


def offline_summary(source: Source) -> str:
    """The transcript of the body in at most `characters_max` characters, always the same.

    Where it does not fit, what is kept are blocks of the beginning (a third of the room) and of the
    end, the last user message whole (if it fits into half the room), and marks that say which
    entries are missing. A block longer than a quarter of the room is shortened inside. Only what is
    kept is rendered.
    """
    body = source.body

    @cache
    def block(position: int) -> str:
        # Before anything is shortened: half a secret would not be known for one.
        return source.redact(render(body[position].item))

    if not body:
        return NOTHING
    if _fits(map(block, range(len(body))), source.characters_max):
        return _BETWEEN.join(map(block, range(len(body))))
    mark = _entries_left_out(len(body), body[0], body[-1])
    room = source.characters_max - 2 * len(mark + _BETWEEN)
    kept: dict[int, str] = {}
    asked = _last_user_message(body)
    if asked is not None and len(block(asked)) <= source.characters_max // 2:
        kept[asked] = block(asked)
        room -= len(block(asked) + _BETWEEN)
    block_max = min(source.characters_max // 4, room // 3 - len(_BETWEEN))

    def keep(positions: Iterable[int], room: int) -> int:
        """Keep blocks while there is room; what is left of it."""
        for position in positions:
            if position not in kept:
                text = shorten(block(position), block_max)
                if len(text + _BETWEEN) > room:
                    break
                kept[position] = text
                room -= len(text + _BETWEEN)
        return room

    room_after_head = room - room // 3 + keep(range(len(body)), room // 3)
    keep(reversed(range(len(body))), room_after_head)
    return shorten(_BETWEEN.join(_with_marks(kept, body)), source.characters_max)


def _fits(blocks: Iterable[str], room: int) -> bool:
    room += len(_BETWEEN)  # there is none after the last block
    for block in blocks:
        room -= len(block) + len(_BETWEEN)
        if room < 0:
            return False
    return True


def _last_user_message(body: Sequence[Entry]) -> int | None:
    for position in reversed(range(len(body))):
        item = body[position].item
        if b'"user"' in item:  # ten times faster than looking at its facts
            role = item_facts(item).role
            if role is Role.USER or (role is Role.REMINDER and not is_only_reminder(item)):
                return position
    return None


def _with_marks(kept: dict[int, str], body: Sequence[Entry]) -> Iterable[str]:
    start = 0
    for position in sorted(kept):
        if start < position:
            yield _entries_left_out(position - start, body[start], body[position - 1])
        yield kept[position]
        start = position + 1
    if start < len(body):
        yield _entries_left_out(len(body) - start, body[start], body[-1])


def _entries_left_out(number: int, first: Entry, last: Entry) -> str:
    return f"[… {spaced(number)} entries left out, ids {first.entry_id} to {last.entry_id} …]"
