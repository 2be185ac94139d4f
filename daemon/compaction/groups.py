"""Groups: the spans of a history that only make sense whole.

A call and its outputs, the calls that were made at once, the reasoning that led to them, and
whatever stands between: a provider refuses an output without its call, a call without its output,
and a reasoning item without the item that it led to. So a history is only cut between groups.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from recapd.protocol.items import ItemFacts, Role


def groups(facts: Sequence[ItemFacts]) -> list[range]:
    """The positions of each group, in order; together they cover all of `facts`, each once.

    No call is in another group than one of its outputs. Calls in a row are one group, whatever the
    order of their outputs, and reasoning belongs to what the model made right after it. Any other
    item is a group by itself.
    """
    last = list(range(len(facts)))  # for each position, the last one that it must stay with
    for call, output in _pairs(facts):
        last[call] = output
    for position, (fact, following) in enumerate(pairwise(facts)):
        if _stays_with(fact, following):
            last[position] = max(last[position], position + 1)
    spans: list[range] = []
    start = end = 0
    for position, reach in enumerate(last):
        if position > end:
            spans.append(range(start, end + 1))
            start = position
        end = max(end, reach)
    if last:
        spans.append(range(start, end + 1))
    return spans


def first_unanswered(facts: Sequence[ItemFacts]) -> int:
    """The position of the first call that no later item answers; `len(facts)` if there is none."""
    waiting: dict[str, int] = {}
    for position, fact in enumerate(facts):
        for call_id in fact.outputs:
            waiting.pop(call_id, None)
        for call_id in fact.calls:
            waiting.setdefault(call_id, position)
    return min(waiting.values(), default=len(facts))


def _pairs(facts: Sequence[ItemFacts]) -> Iterator[tuple[int, int]]:
    """Each call with each of its outputs; an id used again after its output is a new call."""
    calls: dict[str, int] = {}
    answered: set[str] = set()
    for position, fact in enumerate(facts):
        for call_id in fact.outputs:
            if call_id in calls:
                answered.add(call_id)
                yield calls[call_id], position
        for call_id in fact.calls:
            if call_id in answered or call_id not in calls:
                answered.discard(call_id)
                calls[call_id] = position


def _stays_with(fact: ItemFacts, following: ItemFacts) -> bool:
    if fact.type == "reasoning":
        return following.role is Role.OTHER and not following.outputs
    return bool(fact.calls and following.calls)
