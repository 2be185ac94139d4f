"""From facts to the block that a reminder carries, within a number of tokens.

The last request comes first and is the last to be shortened. The rest is shared by
`Section.percent`; what a section does not need goes to the others in their order. So when the block
shrinks, every list loses its oldest facts, and at the very end the request loses its middle.
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
_LINE_END = re.compile("\r\n|[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")
_SEAM_TOKENS = 4  # by which the whole may exceed the sum of its parts, where only a request is left

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Room:
    """How many tokens the block may have."""

    request_tokens: int  # with the last request, which may need more than the lists
    tokens: int  # where it does not


def write(evidence: Evidence, room: Room, count: Callable[[str], int] | None = None) -> str:
    """The block, in at most `max(room.request_tokens, room.tokens)` tokens; '' where nothing fits.

    `count` gives the tokens of a text as it stands in the item's JSON text.
    """
    count = count or count_written
    tokens_max = max(room.request_tokens, room.tokens)
    frame = count(HEADING)
    request = _request(
        evidence, min(tokens_max - frame - _SEAM_TOKENS, REQUEST_TOKENS_MAX + _SEAM_TOKENS), count
    )
    if evidence.last_request is not None and not request:
        return ""  # what was asked is worth more than all lists
    left = room.tokens - frame - (count(request) if request else 0)
    lists = {
        section: _lines(section, facts)
        for section, facts in evidence.sections.items()
        if facts and left > 0
    }
    kept = _keep(lists, left, count) if lists else {}
    while request or any(kept.values()):
        text = _block(request, kept)
        excess = count(text) - tokens_max
        if excess <= 0:
            return text
        # Tokens do not quite add up over lines; the least important lines make up for it.
        last = next((section for section in reversed(Section) if kept.get(section)), None)
        if last is None:
            break
        kept[last].pop()
    return ""


def count_written(text: str) -> int:
    """The tokens of `text` within the JSON text of an item, with a line break before it."""
    return count_tokens(_encode("\n" + text).decode()[1:-1]).count


def _request(evidence: Evidence, tokens_max: int, count: Callable[[str], int]) -> str:
    """The last request with its heading; its middle left out where the whole is too long."""
    if evidence.last_request is None:
        return ""
    entry_id, text = evidence.last_request
    characters = min(len(text), REQUEST_CHARACTERS_MAX)
    while True:
        # A line of it never begins where headings and facts do, whatever ends lines for the reader.
        body = _LINE_END.sub(r"\g<0>  ", shorten(text, characters))
        written = f"{LAST_REQUEST_HEADING}\n[{entry_id}] {body}"
        tokens = count(written)
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
    lists: dict[Section, list[str]], tokens: int, count: Callable[[str], int]
) -> dict[Section, list[str]]:
    """The first lines of each section: within its share, again of what is left, then in order."""
    kept: dict[Section, list[str]] = {section: [] for section in lists}
    left = tokens
    for share_only in (True, True, False):
        shared = left
        for section, lines in lists.items():
            room = min(left, shared * section.percent // 100) if share_only else left
            for line in lines[len(kept[section]) :]:
                cost = count(line) + (0 if kept[section] else count(section.heading))
                if cost > room:
                    break
                kept[section].append(line)
                room -= cost
                left -= cost
    return kept


def _block(request: str, kept: dict[Section, list[str]]) -> str:
    lines = [HEADING]
    if request:
        lines.append(request)
    for section in Section:
        if kept.get(section):
            lines += [section.heading, *kept[section]]
    return "\n".join(lines)
