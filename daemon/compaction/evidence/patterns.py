"""Identifiers in any text: URLs, ids of commits, versions, ports, error codes, and numbers.

All but upper-case codes have a digit. So one quick pattern finds the digits, and only the word
around each is looked at more closely.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

_FROM_COLON_ON = re.compile(r"://[^\s\"'<>`|\\^{}]{2,500}")
_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{1,15}\Z")
_SCHEME_CHARACTERS_MAX = 16
_FROM_DIGIT_ON = re.compile(r"[0-9](?:[\w.:+%-]|,(?=[0-9]{3}(?![0-9])))*")
_CODE = re.compile(r"[ES][A-Z]{3,14}\b")  # ENOENT, SIGKILL; `EXIT` is sorted out below
_IDENTIFIER = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"  # UUID, RFC 9562
    r"|(?=\d{0,40}[a-f])[0-9a-f]{7,40}"  # commit; the digit is known to be there
    r"|v?\d{1,5}\.\d{1,5}\.\d{1,6}(?:[.+-]?[0-9A-Za-z.]{1,30})?"  # version, IPv4 address
    r"|(?:localhost|\d{1,3}(?:\.\d{1,3}){3}):\d{2,5}"
    r"|[A-Z]{1,6}-?\d{2,6}|[A-Z]{2,10}(?:_[A-Z0-9]{2,20}){1,4}|0x[0-9a-fA-F]{4,16}"
)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:%|[a-zA-Z]{1,3})?")
_UNIT = re.compile(
    r" (?:%|(?:ms|s|min|h|[kKMG]i?B|[MG]Hz|px|USD|EUR|seconds|minutes|hours|days|bytes|tokens|lines"
    r"|files|tests|errors|passed|failed)\b)"
)
_NO_CODES = frozenset({"EXIT", "ERROR", "ERRORS", "EDIT", "EACH", "EVERY", "ELSE", "EXAMPLE"})
_CONTEXT_CHARACTERS = 24
_LEFT_CHARACTERS_MAX = 40

Kind = Literal["identifier", "number", ""]


def urls(text: str, seen: set[str]) -> Iterator[str]:
    """Each URL of any scheme, without the punctuation of the sentence around it.

    Without those of `seen`, where they are noted.
    """
    for match in _FROM_COLON_ON.finditer(text):
        rest = match[0]
        if rest not in seen:
            seen.add(rest)
            start = match.start()
            scheme = _SCHEME.search(text, max(start - _SCHEME_CHARACTERS_MAX, 0), start)
            if scheme is not None:
                yield (scheme[0] + rest).rstrip(".,;:!?*]" if "(" in rest else ".,;:!?*])")


def identifiers_and_numbers(text: str, *, numbers: bool = True) -> Iterator[tuple[Kind, str]]:
    """Ids of commits and others, versions, addresses with ports, error codes; `numbers` as well.

    A number has two digits or a unit; the words right before it come along, for they say of what.
    """
    for match in _CODE.finditer(text):
        start = match.start()
        known = match[0] in _NO_CODES or (match[0][0] == "S" and not match[0].startswith("SIG"))
        if not known and not text[start - 1 : start].isalnum():
            yield "identifier", match[0]
    done = 0
    for match in _FROM_DIGIT_ON.finditer(text):
        start, end = match.span()
        if start < done:
            continue
        done = end
        left = max(start - _LEFT_CHARACTERS_MAX, 0)
        while start > left and (text[start - 1].isalnum() or text[start - 1] in "._-:$€£"):
            start -= 1
        word = text[start:end].rstrip(".:-+").lstrip(".:_")
        kind = _kind(word)
        if kind == "identifier":
            yield kind, word
        elif kind and numbers:
            unit = _UNIT.match(text, end)
            if unit is not None:
                word += unit[0]
            yield kind, _before(text, start) + word


@lru_cache(maxsize=4096)
def _kind(word: str) -> Kind:
    if _IDENTIFIER.fullmatch(word):
        return "identifier"
    digits = word.lstrip("$€£")
    return "number" if len(digits) > 1 and _NUMBER.fullmatch(digits) else ""


def _before(text: str, end: int) -> str:
    """The words of the same line right before `end`."""
    start = max(end - _CONTEXT_CHARACTERS, 0)
    _, line_end, words = text[start:end].rpartition("\n")
    if start and not line_end:
        words = words.partition(" ")[2]  # the first word may be cut
    return words.lstrip()
