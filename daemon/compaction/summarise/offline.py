"""The summary without a model: the transcript, shortened."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import anyio.to_thread

from recapd.daemon.compaction.partition import is_only_reminder
from recapd.daemon.compaction.summarise.base import Source, Summariser, Summary
from recapd.daemon.compaction.transcript import render, shorten, spaced
from recapd.protocol.items import Role, item_facts
from recapd.storage.entry import Entry

NOTHING = "There was nothing to summarise."

_INLINE_BYTES = 200_000  # a body that small is summarised in a millisecond or two

_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class OfflineSummariser(Summariser):
    """Shortens the transcript (`offline_summary`): nothing leaves the process.

    No code can follow the caller's `focus`, so it stands in front for whoever reads the summary.
    """

    focus: str = ""

    async def __call__(self, source: Source) -> Summary:
        if sum(len(entry.item) for entry in source.body) <= _INLINE_BYTES:
            return Summary(offline_summary(source, self.focus), "offline")
        # In a thread, for an item may have 16 MiB; it reads few, so a cancel does not wait long.
        summary = await anyio.to_thread.run_sync(offline_summary, source, self.focus)
        return Summary(summary, "offline")


def offline_summary(source: Source, focus: str = "") -> str:
    """The transcript of the body in at most `characters_max` characters, always the same.

    Where it does not fit, long blocks are shortened inside, though not below a quarter of the room.
    Where that is not enough, what is kept are blocks of the beginning (a third of the room) and of
    the end, and marks that say which entries are missing. The last user message is kept whole if it
    fits into half the room. Only what is kept is rendered. `focus` gets an eighth of the room.
    """
    body, characters_max = source.body, source.characters_max
    if not body:
        return NOTHING
    asked_for = f"Asked for most: {source.redact(focus)}" if focus else ""
    asked_for = shorten(asked_for, characters_max // 8)
    characters_max -= len(asked_for + _BETWEEN) if asked_for else 0

    @cache
    def block(position: int) -> str:
        # Before anything is shortened: half a secret would not be known for one.
        return source.redact(render(body[position].item))

    kept: dict[int, str] = {}
    asked = _last_user_message(body)
    if asked is not None and len(block(asked)) <= characters_max // 2:
        kept[asked] = block(asked)
    rest = [position for position in range(len(body)) if position not in kept]
    room = characters_max + len(_BETWEEN) - sum(len(text + _BETWEEN) for text in kept.values())
    quarter = characters_max // 4

    if _fits((min(len(block(position)), quarter) for position in rest), room):
        share = _fair_share([len(block(p)) for p in rest], room - len(rest) * len(_BETWEEN))
        kept |= {position: shorten(block(position), share) for position in rest}
    else:
        room -= 2 * len(_entries_left_out(len(body), body[0], body[-1]) + _BETWEEN)
        share = min(quarter, room // 3 - len(_BETWEEN))

        def shortened(position: int) -> str:
            return shorten(block(position), share)

        room = room - room // 3 + _keep(kept, rest, room // 3, shortened)
        _keep(kept, reversed(rest), room, shortened)
    transcript = shorten(_BETWEEN.join(_with_marks(kept, body)), characters_max)
    return f"{asked_for}{_BETWEEN}{transcript}" if asked_for else transcript


def _fits(lengths: Iterable[int], room: int) -> bool:
    for length in lengths:
        room -= length + len(_BETWEEN)
        if room < 0:
            return False
    return True


def _fair_share(lengths: Sequence[int], room: int) -> int:
    """The greatest length such that, if nothing is longer, all of it fits into `room`."""
    for number, length in enumerate(sorted(lengths)):
        share = room // (len(lengths) - number)
        if length > share:
            return share
        room -= length
    return max(lengths, default=0)


def _keep(
    kept: dict[int, str], positions: Iterable[int], room: int, block: Callable[[int], str]
) -> int:
    """Keep blocks in the order of `positions` as long as there is room; what is left of it."""
    for position in positions:
        if position not in kept:
            text = block(position)
            if len(text + _BETWEEN) > room:
                break
            kept[position] = text
            room -= len(text + _BETWEEN)
    return room


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
