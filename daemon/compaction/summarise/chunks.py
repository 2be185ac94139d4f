"""A transcript in pieces that fit: cut between groups, as even as may be.

Where a group alone is too long it is cut between its items, and an item that alone is too long is
shortened in its middle. So no transcript is too long.
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


class Transcript:
    """The blocks of entries, to be taken from first to last."""

    def __init__(self, entries: Sequence[Entry], blocks: Sequence[Block]) -> None:
        """`blocks` are those of `entries`, one for each."""
        self._blocks = blocks
        self._sums = [0, *accumulate(one.tokens for one in blocks)]
        spans = groups([item_facts(entry.item) for entry in entries])
        self._ends = [span.stop for span in spans]

    def __len__(self) -> int:
        return len(self._blocks)

    def tokens_from(self, start: int) -> int:
        """Of the blocks from `start` on."""
        return self._sums[-1] - self._sums[start]

    def take(self, start: int, tokens_max: int) -> tuple[list[str], int, int]:
        """The next piece of at most `tokens_max` tokens: its blocks, its tokens, and where it ends.

        What is left is divided evenly: the piece is as near to its share as a cut between groups
        allows.
        """
        left = self.tokens_from(start)
        share = left / -(-left // tokens_max) if left else 0
        first = bisect.bisect_right(self._ends, start)
        stop = self._nearest(self._ends[first:], start, share, tokens_max)
        if stop is None:
            stop = self._nearest(range(start + 1, self._ends[first] + 1), start, share, tokens_max)
        if stop is None:
            text = shorten_to_tokens(self._blocks[start].text, tokens_max)
            return [text], tokens_max, start + 1
        texts = [one.text for one in self._blocks[start:stop]]
        return texts, self._sums[stop] - self._sums[start], stop

    def _nearest(
        self, ends: Sequence[int], start: int, share: float, tokens_max: int
    ) -> int | None:
        """Of `ends`, the one where the piece from `start` is nearest to `share` and fits."""

        def size(end: int) -> int:
            return self._sums[end] - self._sums[start]

        place = bisect.bisect_left(ends, share, key=size)
        fitting = [end for end in ends[max(place - 1, 0) : place + 1] if size(end) <= tokens_max]
        return min(fitting, key=lambda end: abs(size(end) - share), default=None)
