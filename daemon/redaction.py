"""Secrets in what leaves the store: well-known shapes of keys are replaced, and what was replaced
is counted.

Stored bytes are never altered. A shape is specific enough that ordinary text does not have it; what
has no shape of its own (a password in a sentence) is not found.
"""

import json
import re
from collections import Counter
from functools import lru_cache
from typing import Any, Final

import msgspec

from recapd.protocol.items import is_array, is_object

# Not within a word. Text may itself be JSON (arguments of a call): there an escape is no letter.
_START: Final = r"(?:(?<![A-Za-z0-9_])|(?<=\\[nrtbf])|(?<=\\u[0-9A-Fa-f]{4}))"

_SHAPES: Final = {
    "private_key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"
    r"(?:.{1,20000}?-----END (?:[A-Z]+ )*PRIVATE KEY-----|[A-Za-z0-9+/=\s]*)",
    "anthropic_key": _START + r"sk-ant-[A-Za-z0-9_-]{20,}",
    "openai_key": _START + r"sk-(?:proj-|svcacct-|admin-)?[A-Za-z0-9_-]{20,}",
    "github_token": _START + r"(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})",
    "gitlab_token": _START + r"glpat-[A-Za-z0-9_-]{20,}",
    "aws_key_id": _START + r"(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "google_key": _START + r"AIza[A-Za-z0-9_-]{35}",
    "slack_token": _START + r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    "stripe_key": _START + r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "npm_token": _START + r"npm_[A-Za-z0-9]{36}\b",
    "pypi_token": _START + r"pypi-[A-Za-z0-9_-]{50,}",
    "huggingface_token": _START + r"hf_[A-Za-z0-9]{34,}",
    "jwt": _START + r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    "bearer_token": r"(?<=[Bb]earer )[A-Za-z0-9._~+/-]{20,}=*",
    "url_password": r"(?<=://)[^\s/:@\"\\]{1,200}:[^\s/:@\"\\]{1,200}(?=@)",
}
# One of these is in every match: looking for them first is fifty times faster than a pattern.
_HINTS: Final = {
    "PRIVATE KEY": "private_key",
    "sk-ant-": "anthropic_key",
    "sk-": "openai_key",
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"), "github_token"),
    "glpat-": "gitlab_token",
    **dict.fromkeys(("AKIA", "ASIA"), "aws_key_id"),
    "AIza": "google_key",
    "xox": "slack_token",
    **dict.fromkeys(("k_live_", "k_test_"), "stripe_key"),
    "npm_": "npm_token",
    "pypi-": "pypi_token",
    "hf_": "huggingface_token",
    "eyJ": "jwt",
    "earer ": "bearer_token",
    "://": "url_password",
}
_ASCII_ESCAPE: Final = re.compile(rb"\\u00[2-7]")  # a letter that need not be escaped


def _as_written(number: str) -> msgspec.Raw:
    return msgspec.Raw(number.encode())


_decode = msgspec.json.Decoder(float_hook=_as_written).decode
encode_item = msgspec.json.Encoder().encode


def decode_item(item: bytes) -> Any:
    """An item, with numbers as they are written wherever Python would change them."""
    try:
        return _decode(item)
    except msgspec.ValidationError:  # an integer of more digits than Python takes by default
        return json.loads(item, parse_int=_as_written, parse_float=_as_written)


@lru_cache(maxsize=64)
def _pattern(kinds: frozenset[str]) -> re.Pattern[str]:
    """The shapes of `kinds`, in their order: a pattern is as slow as it has alternatives."""
    shapes = (f"(?P<{kind}>{shape})" for kind, shape in _SHAPES.items() if kind in kinds)
    return re.compile("|".join(shapes), re.DOTALL)


class Redactor:
    """Replaces secrets by `[redacted KIND]`; `counts` has how many of each kind so far.

    With `each_once` a secret counts once however often it is met: for whoever reads the same text
    several times.
    """

    def __init__(self, counts: dict[str, int] | None = None, *, each_once: bool = False) -> None:
        self.counts: Counter[str] = Counter(counts or {})
        self._seen: set[str] | None = set() if each_once else None

    def text(self, text: str) -> str:
        """The text without its secrets; the same object when there are none."""
        hinted = {kind for hint, kind in _HINTS.items() if hint in text}
        if "@" not in text:
            hinted.discard("url_password")
        if not hinted:
            return text
        return _pattern(frozenset(hinted)).sub(self._replace, text)

    def item(self, item: bytes) -> bytes:
        """An item, as JSON text, without its secrets; the same bytes when there are none.

        Each string is looked at as what it says, for in JSON text an escape may stand in front of a
        secret, or in it. An item that has one is written anew, numbers as they were.
        """
        if _ASCII_ESCAPE.search(item) is None:
            text = item.decode()
            if not any(hint in text for hint in _HINTS):
                return item
        found = self.counts.total()
        value = self._value(decode_item(item))
        return item if self.counts.total() == found else encode_item(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if is_array(value):
            return [self._value(one) for one in value]
        if is_object(value):
            return {self.text(name): self._value(member) for name, member in value.items()}
        return value

    def _replace(self, match: re.Match[str]) -> str:
        kind = match.lastgroup or "secret"
        if self._seen is None or match[0] not in self._seen:
            self.counts[kind] += 1
        if self._seen is not None:
            self._seen.add(match[0])
        return f"[redacted {kind}]"
