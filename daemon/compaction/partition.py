"""Partition: what a compaction keeps, leaves out and summarises (PROTOCOL.md §5.1)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from recapd.daemon.compaction.groups import first_unanswered, groups
from recapd.daemon.compaction.tokens import estimate_tokens
from recapd.protocol.items import (
    REMINDER_END,
    REMINDER_TAG,
    ItemFacts,
    Role,
    is_array,
    is_object,
    item_facts,
)
from recapd.storage.entry import Entry

REMINDERS_MAX = 10
"""Earlier reminders that outlive a compaction: the newest ones (PROTOCOL.md §5.1)."""

Reminders = Literal["all", "issued"]
"""Which reminders are more than ordinary user messages: all, or only those that recapd made."""

# Looking a member up in its Enum takes 0.1 µs, longer than all else that is done for an entry here.
_INSTRUCTION, _REMINDER = Role.INSTRUCTION, Role.REMINDER


class _Message(msgspec.Struct):
    content: Any = None


_decode_message = msgspec.json.Decoder(_Message, float_hook=str).decode


@dataclass(frozen=True, slots=True)
class Partition:
    """A history divided; each entry is in exactly one part, and each part is in the old order."""

    instructions: tuple[
        Entry, ...
    ]  # input messages of role system or developer, wherever they stood
    reminders: tuple[Entry, ...]  # the newest, to be retained
    dropped: tuple[Entry, ...]  # older messages that are nothing but reminders
    body: tuple[Entry, ...]  # to be summarised
    tail: tuple[Entry, ...]  # unanswered calls and what is recent, to be retained
    body_facts: tuple[ItemFacts, ...] = ()  # those of the body's items

    @property
    def nothing_to_summarise(self) -> bool:
        """Whether there is nothing but what is retained anyway and what is left out (§5.5)."""
        return not self.body


def partition(
    history: Sequence[Entry],
    facts: Sequence[ItemFacts] | None = None,
    *,
    keep_recent_tokens: int = 0,
    reminders: Reminders = "all",
) -> Partition:
    """Divide `history`; `facts` are those of its items where the caller has them already.

    The tail begins with the group of the first unanswered call. It begins earlier where more of the
    latest groups fit into `keep_recent_tokens` whole, by the cheap estimate.

    Raises:
        InvalidItem: an item is not a JSON object.
    """
    if facts is None:
        facts = [item_facts(entry.item) for entry in history]
    instructions = [p for p, fact in enumerate(facts) if fact.role is _INSTRUCTION]
    found = [
        position
        for position, fact in enumerate(facts)
        if fact.role is _REMINDER and (reminders == "all" or history[position].reminder is not None)
    ]
    retained = found[-REMINDERS_MAX:]
    # A question that was sent together with an old reminder must not vanish: it is summarised.
    dropped = [p for p in found[:-REMINDERS_MAX] if is_only_reminder(history[p].item)]
    apart = {*instructions, *retained, *dropped}
    rest = [position for position in range(len(history)) if position not in apart]
    cut = _tail_start(
        [history[position] for position in rest],
        [facts[position] for position in rest],
        keep_recent_tokens,
    )

    def part(positions: Sequence[int]) -> tuple[Entry, ...]:
        return tuple(history[position] for position in positions)

    return Partition(
        part(instructions),
        part(retained),
        part(dropped),
        part(rest[:cut]),
        part(rest[cut:]),
        tuple(facts[position] for position in rest[:cut]),
    )


def is_only_reminder(item: bytes) -> bool:
    """Whether a user message, `item` being its JSON text, says nothing beside its reminders.

    Text without the closing tag counts as saying more, since nobody knows where its reminder ends.
    """
    content = _decode_message(item).content
    parts = content if is_array(content) else [content]
    return all(_is_only_reminder_text(part) for part in parts)


def _is_only_reminder_text(part: Any) -> bool:
    if is_object(part):
        part = part.get("text") if part.get("type") in ("input_text", "text") else None
    if not isinstance(part, str):
        return False
    *reminders, rest = part.split(REMINDER_END)
    return not rest.strip() and all(text.lstrip().startswith(REMINDER_TAG) for text in reminders)


def _tail_start(
    entries: Sequence[Entry], facts: Sequence[ItemFacts], keep_recent_tokens: int
) -> int:
    unanswered = first_unanswered(facts)
    start = len(entries)
    if unanswered == start and keep_recent_tokens <= 0:
        return start  # the usual case needs no groups
    room_tokens = keep_recent_tokens
    for group in reversed(groups(facts)):
        answered = group.stop <= unanswered
        if answered and room_tokens <= 0:
            break
        room_tokens -= sum(estimate_tokens(entries[position].item) for position in group)
        if answered and room_tokens < 0:
            break
        start = group.start
    return start
