"""How a command ended, by the text of its output: exit status and the lines that tell of a failure.

Only the two ends of an output are looked at (`WINDOW_CHARACTERS` each): headers stand at its
beginning, errors and statuses at its end.
"""

import re
from collections.abc import Iterator

WINDOW_CHARACTERS = 3_000
"""Of each end of a long text: some 60 lines, more than anyone shows of a failure."""

FAILING_LINES_MAX = 8
"""Of one output: the first ones name the cause, and other outputs want room too."""

_STATUS_ENDS_CHARACTERS = 400

_STATUS = re.compile(
    r"(?:<(?:returncode|exit_code)>\s*"
    r"|\bexit(?:ed)?[ _-]?(?:with[ _])?(?:exit[ _])?(?:code|status|value)?[\"']?\s*[:=]?\s*"
    r"|\b(?:return[ _]?code|rc|status)[\"']?\s*[:=]\s*"
    r"|\breturned(?: non-zero exit status)? )(-?\d{1,10})\b"
)
# The first lines that a tool puts above what the command printed.
_HEADER = re.compile(
    r"\s*(?:[^\n]{0,100}\n){0,3}?\s*"
    r"(?:exit code|exit status|process exited with code|<returncode>|<exit_code>)"
    r"\s*:?\s*(-?\d{1,10})"
)
# Looking for these first is ten times faster than the patterns.
_STATUS_HINTS = ("exit", "return", "rc=", "rc:", "status")
_TIMED_OUT = re.compile(r"\b(?:command |process )timed out\b")
_HINTS = (
    "rror",
    "FAIL",
    "ail",
    "xception",
    "raceback",
    "anic",
    "atal",
    "ERR",
    "denied",
    "not found",
    "E  ",
    "✗",
    "✘",
)
# What leaves no doubt: at the beginning of a line, and behind a word that is in it.
_STRONG_BEGINNING = re.compile(
    r"\s*(?:E\s{2,}\S|(?:\S{1,200}:)?\s*(?:fatal|panic|error|ERROR|FAIL|FAILED|FATAL)\b"
    r"|[\w.]{0,100}(?:Error|Exception)\b|Traceback|npm ERR!|[✗✘]\s)"
)
_STRONG_WITHIN = (
    ("error", re.compile(r"error(?:\[\w{1,20}\]:|:| TS\d)")),
    ("FAIL", re.compile(r"FAIL(?:ED)?\s")),
    (" fail", re.compile(r"[1-9] fail(?:ed|ing|ures?)\b")),
)
_WEAK = re.compile(
    r"error|fail|exception|cannot|could not|can't|not found|no such|denied|undefined|unexpected"
    r"|invalid|missing|assert|refused|timed out|warning",
    re.IGNORECASE,
)


def ends(text: str, characters: int = WINDOW_CHARACTERS) -> str:
    """The two ends of `text`; of a cut line nothing stays, so no half of a secret does either."""
    if len(text) <= 2 * characters:
        return text
    head, tail = text[:characters], text[-characters:]
    return head.rpartition("\n")[0] + "\n" + tail.partition("\n")[2]


def exit_status(text: str) -> str:
    """The status that the output of a command states, `timeout`, or nothing.

    A header at the beginning wins, then the last mention at the end.
    """
    head, tail = text[:_STATUS_ENDS_CHARACTERS].lower(), text[-_STATUS_ENDS_CHARACTERS:].lower()
    if "exit" in head or "returncode" in head:
        header = _HEADER.match(head)
        if header is not None:
            return header[1]
    if any([hint in tail for hint in _STATUS_HINTS]):
        for line in reversed(tail.splitlines()):
            statuses = (
                _STATUS.findall(line) if any([hint in line for hint in _STATUS_HINTS]) else ()
            )
            if statuses:
                return str(statuses[-1])
    return "timeout" if "timed out" in tail and _TIMED_OUT.search(tail) else ""


def failing_lines(text: str, failed: bool) -> Iterator[str]:
    """The lines of an output that tell of a failure, at most `FAILING_LINES_MAX`.

    Of a command that is not known to have failed only those that leave no doubt.
    """
    hinted = any([hint in text for hint in _HINTS])
    if not failed and not hinted:
        return
    found = 0
    weak: list[str] = []
    for line in ends(text).splitlines():
        line = line.strip()
        if not line:
            continue
        if hinted and any([hint in line for hint in _HINTS]) and _is_strong(line):
            yield line
            found += 1
            if found == FAILING_LINES_MAX:
                return
        elif failed and _WEAK.search(line):
            weak.append(line)
    yield from weak[: FAILING_LINES_MAX - found]


def _is_strong(line: str) -> bool:
    if _STRONG_BEGINNING.match(line):
        return True
    return any([hint in line and pattern.search(line) for hint, pattern in _STRONG_WITHIN])
