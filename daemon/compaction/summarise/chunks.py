"""A transcript in pieces that fit: cut between groups, as even as may be.

Where a group alone is too long it is cut between its items, and an item that would take more than
three quarters of a piece is shortened in its middle. So no transcript is too long.
"""

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from recapd.daemon.compaction.groups import groups
from recapd.daemon.compaction.tokens import count_tokens
from recapd.daemon.compaction.transcript import render, shorten
from recapd.protocol.items import item_facts
from recapd.storage.entry import Entry

TOKEN_CHARACTERS_MAX = 8
"""Text with more of them for each token, over the length of a window, is rare: spaces, rulers."""


@dataclass(frozen=True, slots=True)
class Block:
    """One entry as text, and how many tokens it has with the blank line behind it."""

    text: str
    tokens: int


def read_blocks(
    entries: Iterable[Entry],
    redact: Callable[[str], str],
    characters_max: int,
    checkpoint: Callable[[], None] = lambda: None,
) -> list[Block]:
    """The entries as text, none longer than `characters_max`; 4 MB a second, so use a thread.

    `checkpoint` is called before each; what it raises ends the reading.
    """
    blocks: list[Block] = []
    for entry in entries:
        checkpoint()
        # Before anything is shortened: half a secret would not be known for one.
        blocks.append(block(shorten(redact(render(entry.item)), characters_max)))
    return blocks


def block(text: str) -> Block:
    """A block of that text."""
    return Block(text, count_tokens(text).count + 1)


def shorten_to_tokens(text: str, tokens_max: int) -> str:
    """`text` in at most `tokens_max` tokens: its beginning, a mark, and its end."""
    text = shorten(text, max(tokens_max, 1) * TOKEN_CHARACTERS_MAX)
    while (tokens := count_tokens(text).count) > tokens_max and len(text) > 1:
        shorter = shorten(text, len(text) * max(tokens_max, 1) // tokens * 9 // 10)
        if len(shorter) >= len(text):
            return ""  # not even the mark fits
        text = shorter
    return text


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks that are summarised together, how many tokens they have, and what is left then."""

    texts: list[str]
    tokens: int
    stop: int  # where the transcript goes on
    tokens_left: int


class Transcript:
    """The blocks of entries, to be taken from first to last."""

    def __init__(self, entries: Sequence[Entry], blocks: Sequence[Block]) -> None:
        """`blocks` are those of `entries`, one for each."""
        self._blocks = blocks
        self._ends = [span.stop for span in groups([item_facts(entry.item) for entry in entries])]

    def __len__(self) -> int:
        return len(self._blocks)

    def take(self, start: int, tokens_max: int) -> Piece:
        """The next piece of at most `tokens_max` tokens, from block `start` on.

        What is left is divided evenly: the piece is as near to its share as a cut between groups
        allows. No block gets more than three quarters, so that its neighbours go with it.
        """
        block_max = tokens_max * 3 // 4
        sums = [0, *accumulate(min(one.tokens, block_max) for one in self._blocks[start:])]
        share = sums[-1] / max(-(-sums[-1] // tokens_max), 1)
        first = bisect.bisect_right(self._ends, start)
        ends = [end - start for end in self._ends[first:]]
        size = _nearest(ends, sums, share, tokens_max)
        if size is None:  # the group alone is too long
            size = _nearest(range(1, ends[0] + 1), sums, share, tokens_max) or 1
        texts = [
            one.text if one.tokens <= block_max else shorten_to_tokens(one.text, block_max - 1)
            for one in self._blocks[start : start + size]
        ]
        return Piece(texts, sums[size], start + size, sums[-1] - sums[size])


def _nearest(ends: Sequence[int], sums: Sequence[int], share: float, tokens_max: int) -> int | None:
    """Of `ends`, the one whose sum is nearest to `share` and fits; None where none fits."""
    place = bisect.bisect_left(ends, share, key=sums.__getitem__)
    near = [end for end in ends[max(place - 1, 0) : place + 1] if sums[end] <= tokens_max]
    return min(near, key=lambda end: abs(sums[end] - share), default=None)
