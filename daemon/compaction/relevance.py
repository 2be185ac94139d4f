"""Relevance: which groups of a history a model finds worth summarising (PROTOCOL.md §5.2).

Asked for only: each request grades a batch of groups. What is not graded, for whatever reason,
counts as relevant; so do groups with policy in them, and the latest.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import anyio.to_thread

from recapd.daemon.compaction.groups import groups
from recapd.protocol.items import Role, item_facts
from recapd.storage.entry import Entry

GROUP_TOKENS_MAX = 400
"""What is shown of a group: its beginning and its end tell what it is about."""

BATCH_GROUPS_MAX = 50
"""Models lose count of longer lists."""

_GRADE = re.compile(
    r"^\W*(?:part )?(\d{1,9})\W*[:=][^\w-]*?(0?\.\d+|[01](?:\.\d+)?)\W*$",
    re.IGNORECASE | re.MULTILINE,
)

Grade = Callable[[Sequence[tuple[int, str]]], Awaitable[Mapping[int, float] | None]]
"""Asks for the grades of numbered texts; None where there are none to be had."""


async def relevant(
    entries: Sequence[Entry],
    show: Callable[[Sequence[int]], tuple[str, int]],
    grade: Grade,
    *,
    threshold: float,
    batch_tokens_max: int,
) -> list[int]:
    """The positions of entries in relevant groups, in order.

    `show` gives the text of a group, from the positions of its entries, and how many tokens it has;
    it is called in a thread. Once `grade` fails it is not asked again.
    """
    facts = [item_facts(entry.item) for entry in entries]
    spans = groups(facts)
    asked = [
        number
        for number, span in enumerate(spans[:-1])
        if all(facts[position].role is not Role.INSTRUCTION for position in span)
    ]
    left_out: set[int] = set()
    batches = _batches(spans, asked, show, batch_tokens_max)
    for batch in await anyio.to_thread.run_sync(list, batches):
        grades = await grade(batch)
        if grades is None:
            break
        left_out |= {number for number, _ in batch if grades.get(number, threshold) < threshold}
    return list(_kept(spans, left_out))


def read_grades(answer: str) -> dict[int, float]:
    """The grades in an answer, each a line such as `3: 0.7`; the last one counts."""
    grades = {int(number): float(grade) for number, grade in _GRADE.findall(answer)}
    return {number: grade for number, grade in grades.items() if grade <= 1}


def _batches(
    spans: Sequence[range],
    asked: Sequence[int],
    show: Callable[[Sequence[int]], tuple[str, int]],
    tokens_max: int,
) -> Iterator[list[tuple[int, str]]]:
    batch: list[tuple[int, str]] = []
    batch_tokens = 0
    for number in asked:
        text, tokens = show(spans[number])
        if batch and (len(batch) == BATCH_GROUPS_MAX or batch_tokens + tokens > tokens_max):
            yield batch
            batch, batch_tokens = [], 0
        batch.append((number, text))
        batch_tokens += tokens
    if batch:
        yield batch


def _kept(spans: Sequence[range], left_out: set[int]) -> Iterator[int]:
    for number, span in enumerate(spans):
        if number not in left_out:
            yield from span
