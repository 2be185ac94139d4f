"""How large a new reminder may become, so that the ones after it find room as well.

Ten reminders outlive each compaction as they are (PROTOCOL.md §5.1), so what one takes is gone for
the ten after it. The room that instructions, retained reminders and tail leave is divided in the
proportions 1, 1/2, 1/3, … 1/11: a session's first reminder gets 33 % of it, the second 25 % of what
is then left. Where few are still to come, more than 33 % is given only as far as the next one will
inherit as much from the oldest reminder, which then falls out. So a first compaction, the only one
of most sessions, is generous, and there is always something left for the next.
"""

from recapd.daemon.compaction.partition import REMINDERS_MAX
from recapd.daemon.compaction.tokens import BYTES_PER_TOKEN

SUMMARY_CHARACTERS_MIN = 200
"""Less would be marks of what is missing and nothing else."""

WHOLE_CHARACTERS_MAX = 3_000
"""Of a transcript that need not be shortened because its body is small."""

EVIDENCE_PART = 8
"""Of `context_limit`: more retains little more (`scripts/bench retention`), and takes time."""

EVIDENCE_TOKENS_MIN = 500
"""For what the summary does not say already, however little the reminder replaces."""

_PARTS = [1 / (number + 1) for number in range(REMINDERS_MAX + 1)]
_SHARES = [part / sum(_PARTS[number:]) for number, part in enumerate(_PARTS)]


def allowance_tokens(room_tokens: int, earlier: int, oldest_tokens: int = 0) -> int:
    """Of `room_tokens` that are free, those for the reminder that joins `earlier` ones.

    `earlier` counts those that recapd made: others are small, and make room as they fall out.
    `oldest_tokens` is the size of the oldest retained reminder.
    """
    share = int(room_tokens * _SHARES[min(earlier, REMINDERS_MAX)])
    safe = int(room_tokens * _SHARES[0])
    return max(min(share, max(safe, oldest_tokens)), 0)


def summary_characters(allowance: int, characters_max: int, body_bytes: int) -> int:
    """Of a reminder of `allowance` tokens a third is for the summary; two may be evidence.

    Of a body of some pages the summary is three quarters at most, or the new history would be as
    large as the old one (B06).
    """
    part = max(body_bytes * 3 // 4, WHOLE_CHARACTERS_MAX)
    room = max(allowance // 3 * BYTES_PER_TOKEN, SUMMARY_CHARACTERS_MIN)
    return min(characters_max, part, room)


def evidence_tokens(allowance: int, context_limit: int) -> int:
    """Of the lists of evidence: two thirds of the allowance, and an eighth of `context_limit`."""
    return max(min(allowance * 2 // 3, context_limit // EVIDENCE_PART), 0)
