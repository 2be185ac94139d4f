"""Compaction, from a history to the one that replaces it (PROTOCOL.md §5); nothing is stored here.

::

    history ─ divide ─► Partition ─ prepare: summarise, evidence, check ─► Plan ─ build ─► history

`divide` and `prepare` take their time and change nothing, so a cancel leaves nothing behind.
`build` is instant and the first to need an id: a session's actor calls it when it commits.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol

import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from recapd.daemon.compaction.allowance import (
    EVIDENCE_TOKENS_MIN,
    allowance_tokens,
    evidence_tokens,
    summary_characters,
)
from recapd.daemon.compaction.evidence.gather import gather
from recapd.daemon.compaction.evidence.write import Room, count_written, write
from recapd.daemon.compaction.partition import Partition, Reminders, partition
from recapd.daemon.compaction.reminder import reminder_item
from recapd.daemon.compaction.summarise.base import (
    SUMMARY_CHARACTERS_MAX,
    Quality,
    Source,
    Summariser,
    accept,
)
from recapd.daemon.compaction.tokens import (
    BYTES_PER_TOKEN,
    TokenCount,
    count_item_tokens,
    count_tokens_of,
    estimate_tokens,
)
from recapd.protocol.errors import ResultTooLarge
from recapd.protocol.items import ItemFacts, item_facts
from recapd.protocol.messages import Attempt
from recapd.storage.entry import Entry, Reminder

SLICE_BYTES = 1_000_000
"""Of items looked at before the event loop gets its turn, which takes about a millisecond."""

ENTRY_BYTES = 2_000
"""What looking at an item costs however short it is, in bytes of a long one."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to compact."""

    context_limit: int = 20_000  # tokens of the new history
    keep_recent_tokens: int = 0  # for the latest groups, beside unanswered calls
    reminders: Reminders = "all"
    fold_reminders: bool = False  # into the summary, where they leave no room for it
    summary_characters_max: int = SUMMARY_CHARACTERS_MAX


class Progress(Protocol):
    """Is told how far a stage is: `partition` in entries, `check` 0 or 1 of 1; `summarise` too,
    and between in characters of answers where a model is asked.
    """

    def __call__(self, stage: str, done: int, total: int) -> None: ...


def _tell_nobody(stage: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Plan:
    """A compaction that only lacks an id and a time."""

    parts: Partition
    summary: str
    evidence: str  # the block beside the summary; '' where there is none
    quality: Quality
    attempts: tuple[Attempt, ...]  # to ask a model
    tokens_after: TokenCount  # of what `build` makes, without `carried`

    def build(
        self,
        entry_id: int,
        at_ms: int,
        provenance: Reminder | None,
        carried: Sequence[Entry] = (),
    ) -> list[Entry]:
        """The new history; `carried` is what was appended since the history was divided.

        `provenance` goes beside the new reminder, and the revision it names into its text; None
        where nothing was archived. Should that revision have more digits than the one that
        `prepare` was told, `tokens_after` may be one short.
        """
        archived_revision = provenance.archived_revision if provenance else None
        item = reminder_item(self.summary, archived_revision, self.evidence)
        return [
            *self.parts.instructions,
            *self.parts.reminders,
            Entry(entry_id, at_ms, item, provenance),
            *self.parts.tail,
            *carried,
        ]


async def divide(
    history: Sequence[Entry],
    settings: Settings = Settings(),
    progress: Progress = _tell_nobody,
) -> Partition:
    """Divide any history, an empty one too, without holding up the event loop.

    Raises:
        InvalidItem: an item is not a JSON object.
    """
    facts: list[ItemFacts] = []
    for start, stop in _slices(history):
        progress("partition", start, len(history))
        facts += [item_facts(history[position].item) for position in range(start, stop)]
        await anyio.lowlevel.checkpoint()
    divide_it = partial(
        partition,
        history,
        facts,
        keep_recent_tokens=settings.keep_recent_tokens,
        reminders=settings.reminders,
    )
    # A thread costs more than it saves where the work is shorter than a slice.
    divided = (
        divide_it()
        if len(history) * ENTRY_BYTES <= SLICE_BYTES
        else await anyio.to_thread.run_sync(divide_it)
    )
    if settings.fold_reminders:
        divided = await _fold(divided, settings.context_limit)
    progress("partition", len(history), len(history))
    return divided


async def _fold(parts: Partition, context_limit: int) -> Partition:
    """Move the oldest reminders into the body until a quarter of the limit is free for the new one.

    They are older than what happened since, so they come first.
    """
    others = [entry.item for entry in (*parts.instructions, *parts.tail)]
    sizes = [(await count_tokens_of([entry.item])).count for entry in parts.reminders]
    excess = (await count_tokens_of(others)).count + sum(sizes) - context_limit * 3 // 4
    folded = 0
    while excess > 0 and folded < len(sizes):
        excess -= sizes[folded]
        folded += 1
    moved = parts.reminders[:folded]
    return replace(
        parts,
        reminders=parts.reminders[folded:],
        body=moved + parts.body,
        body_facts=(*(item_facts(entry.item) for entry in moved), *parts.body_facts),
    )


async def prepare(
    parts: Partition,
    *,
    summarise: Summariser,
    settings: Settings = Settings(),
    archived_revision: int | None = None,
    progress: Progress = _tell_nobody,
    redact: Callable[[str], str] = str,
) -> Plan:
    """Summarise the body, add evidence, and check the result by the exact count of tokens.

    Summary and evidence have the room that `allowance` gives them. Where the reminder would exceed
    `context_limit` all the same, or be larger than what it replaces, the evidence is cut to what
    the summary does not say, and shrinks in the order that `evidence.write` tells; for its own sake
    not below `EVIDENCE_TOKENS_MIN`.

    `archived_revision` is the one that the reminder's text is going to name, as far as known;
    `redact` takes secrets out of what the summariser is given and out of the evidence.

    Raises:
        CompactionFailed: the summariser has none (its own stage), or not one to keep (`accept`).
        ResultTooLarge: more than `context_limit` tokens; `data` has the `parts` they come from.
    """
    room = await measure(parts, settings)
    source = source_of(parts, room, settings, redact, progress)
    progress("summarise", 0, 1)
    summary = await summarise(source)
    text = accept(summary.text)
    progress("summarise", 1, 1)
    progress("check", 0, 1)
    lists_tokens = evidence_tokens(room.allowance, settings.context_limit)
    fit = partial(_fit, parts, text, archived_revision, room.free, lists_tokens, redact)
    # In a thread however small the body is: to count 30 kB of one letter takes a second (B69).
    evidence, reminder = await anyio.to_thread.run_sync(fit, anyio.from_thread.check_cancelled)
    tokens_after = TokenCount(
        room.retained.count + reminder.count,
        reminder.method,
        room.retained.exact and reminder.exact,
    )
    if tokens_after.count > settings.context_limit:
        raise await _too_large(parts, reminder.count, tokens_after.count, settings)
    progress("check", 1, 1)
    return Plan(parts, text, evidence, summary.quality, summary.attempts, tokens_after)


@dataclass(frozen=True, slots=True)
class Measure:
    """In tokens: what is retained, what is free beside it, and the part for the new reminder; and
    the size of what that replaces.
    """

    retained: TokenCount
    free: int
    allowance: int
    body_bytes: int


async def measure(parts: Partition, settings: Settings) -> Measure:
    """How much room there is."""
    retained = await count_tokens_of(
        [entry.item for part in _retained(parts).values() for entry in part]
    )
    free = settings.context_limit - retained.count
    earlier = sum(entry.reminder is not None for entry in parts.reminders)
    oldest = await count_tokens_of([entry.item for entry in parts.reminders[:1]])
    body_bytes = _bytes_of(parts.body, 2 * settings.summary_characters_max)
    return Measure(retained, free, allowance_tokens(free, earlier, oldest.count), body_bytes)


def source_of(
    parts: Partition,
    room: Measure,
    settings: Settings,
    redact: Callable[[str], str],
    progress: Progress = _tell_nobody,
) -> Source:
    """What the summariser is given."""
    return Source(
        parts.instructions,
        parts.reminders,
        parts.body,
        summary_characters(room.allowance, settings.summary_characters_max, room.body_bytes),
        redact,
        partial(progress, "summarise"),
    )


async def compact_entries(
    history: Sequence[Entry],
    *,
    allocator: Callable[[], int],
    summarise: Summariser,
    settings: Settings = Settings(),
    provenance: Reminder | None = None,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    progress: Progress = _tell_nobody,
) -> list[Entry]:
    """The history that replaces `history`, which may be any, an empty one too.

    Nothing is persisted or archived. `allocator` gives the id of the new reminder; it is called
    once, when all else has succeeded, and not at all on an error or a cancel. Entries that are kept
    are the same entries: ids, times, bytes, provenance.

    Raises:
        InvalidItem: an item is not a JSON object.
        CompactionFailed: there is no summary.
        ResultTooLarge: the result would have more than `context_limit` tokens.
    """
    parts = await divide(history, settings, progress)
    plan = await prepare(
        parts,
        summarise=summarise,
        settings=settings,
        archived_revision=provenance.archived_revision if provenance else None,
        progress=progress,
    )
    return plan.build(allocator(), now_ms(), provenance)


def _retained(parts: Partition) -> dict[str, tuple[Entry, ...]]:
    return {
        "instructions": parts.instructions,
        "reminders": parts.reminders,
        "tail": parts.tail,
    }


def _fit(
    parts: Partition,
    summary: str,
    archived_revision: int | None,
    room: int,
    lists_tokens: int,
    redact: Callable[[str], str],
    checkpoint: Callable[[], None],
) -> tuple[str, TokenCount]:
    """The evidence that fits beside `summary`, and the tokens of the reminder that has both.

    `room` is how many tokens the reminder may have, `lists_tokens` how many the evidence may have
    beside the last request.
    """
    found = gather(
        parts.body,
        parts.body_facts,
        parts.tail,
        parts.dropped,
        characters=lists_tokens * BYTES_PER_TOKEN,
        redact=redact,
        checkpoint=checkpoint,
    )
    written = partial(reminder_item, summary, archived_revision)
    # Half the room may go to a long request: word for word is worth more than what comes later.
    evidence = write(found, Room(room // 2, lists_tokens))
    count = count_item_tokens(written(evidence))
    # No larger than what it replaces: compacting a small history must not make it larger (B06).
    tokens_max = min(room, _tokens_from(count.count, chain(parts.body, parts.dropped)))
    if not evidence or count.count <= tokens_max:
        return evidence, count
    alone = count_item_tokens(written())
    found = found.beyond(summary)
    left = min(max(tokens_max - alone.count, EVIDENCE_TOKENS_MIN), room - alone.count)
    while left > 0 and (
        evidence := write(found, Room(min(room // 2, left), min(lists_tokens, left)), count_written)
    ):
        count = count_item_tokens(written(evidence))
        excess = count.count - alone.count - left
        if excess <= 0:
            return evidence, count
        left -= excess
    return "", alone


def _bytes_of(entries: Iterable[Entry], bytes_max: int) -> int:
    """The bytes of `entries`; from `bytes_max` on it does not matter how many."""
    total = 0
    for entry in entries:
        total += len(entry.item)
        if total >= bytes_max:
            break
    return total


def _tokens_from(tokens_min: int, entries: Iterable[Entry]) -> int:
    """The tokens of `entries`; an estimate where they are far more than `tokens_min`."""
    tokens = 0
    near: list[Entry] = []
    for entry in entries:
        near.append(entry)
        tokens += estimate_tokens(entry.item)
        if tokens > 2 * tokens_min:
            return tokens
    return sum(count_item_tokens(entry.item).count for entry in near)


async def _too_large(
    parts: Partition, reminder_tokens: int, tokens: int, settings: Settings
) -> ResultTooLarge:
    counts = {
        part: (await count_tokens_of([entry.item for entry in entries])).count
        for part, entries in _retained(parts).items()
    }
    return ResultTooLarge(
        tokens=tokens,
        context_limit=settings.context_limit,
        parts={
            "instructions": counts["instructions"],
            "reminders": counts["reminders"],
            "summary": reminder_tokens,
            "tail": counts["tail"],
        },
    )


def _slices(history: Sequence[Entry]) -> Iterator[tuple[int, int]]:
    """Start and stop of spans of about `SLICE_BYTES`."""
    start = work = 0
    for position, entry in enumerate(history):
        work += ENTRY_BYTES + len(entry.item)
        if work >= SLICE_BYTES:
            yield start, position + 1
            start, work = position + 1, 0
    if start < len(history):
        yield start, len(history)
