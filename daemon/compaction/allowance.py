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


def summary_characters(allowance: int, characters_max: int) -> int:
    """Of a reminder of `allowance` tokens a third is for the summary; two are for the evidence."""
    return min(characters_max, max(allowance // 3 * BYTES_PER_TOKEN, SUMMARY_CHARACTERS_MIN))


def evidence_tokens(allowance: int, summary_tokens: int) -> int:
    """What the summary leaves of the allowance, though never less than two thirds of it."""
    return max(allowance - summary_tokens, allowance * 2 // 3)
