"""From facts to the block that a reminder carries.

The last request comes first and is the last to be shortened. Of the lists, the most useful come
first, and when the block must shrink the others lose their oldest facts before them.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

import msgspec

from recapd.daemon.compaction.evidence.facts import (
    HEADING,
    LAST_REQUEST_HEADING,
    SHORT,
    Fact,
    Section,
)
from recapd.daemon.compaction.evidence.gather import Evidence
from recapd.daemon.compaction.tokens import count_tokens
from recapd.daemon.compaction.transcript import shorten

REQUEST_TOKENS_MAX = 4_000
"""Of the last user request: longer ones are pasted documents, whose ends say what is asked."""

REQUEST_CHARACTERS_MAX = 32_000
"""Of the last request: 8 characters for each of its tokens, which only padding exceeds."""

_REQUEST_CHARACTERS_MIN = 60  # a shorter rest would be little more than the mark
_SHORT_LINE_CHARACTERS_MAX = 240
_CHARACTERS_PER_TOKEN = 3  # of paths, commands and identifiers; prose has 4 and more
_LINE_END = re.compile("\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens the block may have."""

    request_tokens: int  # with the last request, which may need more than the lists
    tokens: int  # where it does not


def estimate(text: str) -> int:
    """About how many tokens `text` is, rather too many."""
    if text.isascii():
        return len(text) // _CHARACTERS_PER_TOKEN + 1
    return len(text.encode()) // 2 + 1


def count_written(text: str) -> int:
    """The tokens of `text` within the JSON text of an item, with a line break before it."""
    return count_tokens(_encode("\n" + text).decode()[1:-1]).count


def write(evidence: Evidence, room: Room, count: Callable[[str], int] = estimate) -> str:
    """The block in about `max(room.request_tokens, room.tokens)` tokens; '' where nothing fits.

    Each line is measured by `count`; the whole may have a token more or less than its lines.
    """
    frame = count(HEADING)
    tokens_max = max(room.request_tokens, room.tokens) - frame
    request = _request(evidence.last_request, min(tokens_max, REQUEST_TOKENS_MAX))
    if evidence.last_request is not None and not request:
        return ""  # what was asked is worth more than all lists
    lists = [
        (section.percent, [section.heading, *_lines(section, facts)])
        for section, facts in evidence.sections.items()
        if facts
    ]
    left = room.tokens - frame - (count(request) if request else 0)
    kept = _keep(lists, left, count) if lists else []
    lines = [
        line for (_, lines), number in zip(lists, kept, strict=True) for line in lines[:number]
    ]
    if request:
        lines.insert(0, request)
    return "\n".join([HEADING, *lines]) if lines else ""


def _request(request: Fact | None, tokens_max: int) -> str:
    """The last request with its heading; its middle left out where the whole is too long."""
    if request is None:
        return ""
    entry_id, text = request
    characters = min(len(text), REQUEST_CHARACTERS_MAX)
    while True:
        # A line of it never begins where headings and facts do, whatever ends lines for the reader.
        body = _LINE_END.sub(r"\g<0>  ", shorten(text, characters))
        written = f"{LAST_REQUEST_HEADING}\n[{entry_id}] {body}"
        tokens = estimate(written)
        if tokens > tokens_max:  # word for word is worth an exact count
            tokens = count_written(written)
        if tokens <= tokens_max:
            return written
        characters = min(characters - 1, characters * max(tokens_max, 0) // tokens)
        if characters < _REQUEST_CHARACTERS_MIN:
            return ""


def _lines(section: Section, facts: list[Fact]) -> list[str]:
    if section not in SHORT:
        return [fact.line() for fact in facts]
    lines: list[str] = []
    for entry_id, group in groupby(facts, key=lambda fact: fact.entry_id):
        line = ""
        for _, text in group:
            if line and len(line) + len(text) > _SHORT_LINE_CHARACTERS_MAX:
                lines.append(line)
                line = ""
            line = f"{line} · {text}" if line else f"[{entry_id}] {text}"
        lines.append(line)
    return lines


def _keep(
    lists: list[tuple[int, list[str]]], tokens: int, count: Callable[[str], int]
) -> list[int]:
    """How many lines of each list there is room for: first within its percentage, then in order."""
    kept = [0] * len(lists)
    left = tokens
    for share_only in (True, False):
        for number, (percent, lines) in enumerate(lists):
            room = min(left, tokens * percent // 100) if share_only else left
            for line in lines[kept[number] :]:
                cost = count(line)
                if cost > room:
                    break
                kept[number] += 1
                room -= cost
                left -= cost
    return [number if number > 1 else 0 for number in kept]  # no heading alone
