"""Identifiers in any text: URLs, commits, versions, ports, error codes, and numbers.

Each pattern is tried at the two ends of a text (`outcomes.ends`), so a long one costs no more.
"""

import re
from collections.abc import Iterator

_URL = re.compile(r"\b[a-z][a-z0-9+.-]{1,15}://[^\s\"'<>`|\\^{}]{2,500}", re.IGNORECASE)
_IDENTIFIER = re.compile(
    r"\b(?:"
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"  # UUID, RFC 9562
    r"|(?=[0-9a-f]{0,12}[a-f])(?=[a-f]{0,12}\d)[0-9a-f]{7,40}"  # commit
    r"|v?\d{1,5}\.\d{1,5}\.\d{1,6}(?:[-+][0-9A-Za-z.]{1,30})?"  # version, IPv4 address
    r"|(?:localhost|\d{1,3}\.\d{1,3}):\d{2,5}|port[ =:]{1,2}\d{2,5}"
    r"|E[A-Z]{3,14}|SIG[A-Z]{3,6}|[A-Z]{1,5}-?\d{3,6}|0x[0-9a-fA-F]{4,16}|HTTP[ /]\d{3}"
    r")\b"
)
_UPPER_CASE_WORDS = frozenset({"ERROR", "ERRORS", "EXIT", "EXAMPLE", "ENTER", "EVERY", "EITHER"})
_NUMBER = re.compile(
    r"(?<![\w.,-])[$€£]?(?:\d{1,3}(?:[, ]\d{3})+|\d+)(?:\.\d+)?"
    r"(?:\s?(?:%|ms|s|min|h|[kKMG]i?B|MHz|GHz|px|USD|EUR|tokens|lines|files|tests|bytes)\b)?"
    r"(?![\w.-]*\w)"
)
_CONTEXT_CHARACTERS = 24


def urls(text: str) -> Iterator[str]:
    """Each URL of any scheme, without the punctuation of the sentence around it."""
    if "://" in text:
        for match in _URL.finditer(text):
            yield match[0].rstrip(".,;:!?*)]}" if "(" not in match[0] else ".,;:!?*]}")


def identifiers(text: str) -> Iterator[str]:
    """Commit and other ids, versions, addresses with ports, error codes, signals."""
    for match in _IDENTIFIER.finditer(text):
        if match[0] not in _UPPER_CASE_WORDS:
            yield match[0]


def numbers(text: str) -> Iterator[str]:
    """Numbers with a unit, a fraction or at least two digits, and the words right before them."""
    for match in _NUMBER.finditer(text):
        if len(match[0]) == 1:
            continue
        start = max(match.start() - _CONTEXT_CHARACTERS, 0)
        _, line_end, words = text[start : match.start()].rpartition("\n")
        if start and not line_end:
            words = words.partition(" ")[2]  # the first word may be cut
        yield words.lstrip() + match[0]
