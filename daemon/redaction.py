"""Secrets in what leaves the store: well-known shapes of keys are replaced, and what was replaced
is counted.

Stored bytes are never altered. A shape is specific enough that ordinary text does not have it; what
has no shape of its own (a password in a sentence) is not found.
"""

import re
from collections import Counter
from typing import Final

import msgspec

_SHAPES: Final = {
    "private_key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"
    r"(?:[^\"]{1,20000}?-----END (?:[A-Z]+ )*PRIVATE KEY-----|(?:[A-Za-z0-9+/=\s]|\\[nr])*)",
    "anthropic_key": r"\bsk-ant-[A-Za-z0-9_-]{20,}",
    "openai_key": r"\bsk-(?:proj-|svcacct-|admin-)?[A-Za-z0-9_-]{20,}",
    "github_token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{22,})",
    "gitlab_token": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "aws_key_id": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "google_key": r"\bAIza[A-Za-z0-9_-]{35}",
    "slack_token": r"\bxox[abeoprs]-[A-Za-z0-9-]{10,}",
    "stripe_key": r"\b[rs]k_(?:live|test)_[A-Za-z0-9]{16,}",
    "npm_token": r"\bnpm_[A-Za-z0-9]{36}\b",
    "pypi_token": r"\bpypi-[A-Za-z0-9_-]{50,}",
    "huggingface_token": r"\bhf_[A-Za-z0-9]{34,}",
    "jwt": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    "bearer_token": r"(?<=[Bb]earer )[A-Za-z0-9._~+/-]{20,}=*",
    "url_password": r"(?<=://)[^\s/:@\"\\]{1,200}:[^\s/:@\"\\]{1,200}(?=@)",
}
_PATTERN: Final = re.compile(
    "|".join(f"(?P<{kind}>{shape})" for kind, shape in _SHAPES.items()), re.DOTALL
)
# One of these is in every match: looking for them first is fifty times faster than the pattern.
_HINTS: Final = (
    *("PRIVATE KEY", "sk-", "k_live_", "k_test_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
    *("github_pat_", "glpat-", "AKIA", "ASIA", "AIza", "xox", "npm_", "pypi-", "hf_", "eyJ"),
    *("earer ", "://"),
)
_ASCII_ESCAPE: Final = re.compile(rb"\\u00[2-7]")

_decode = msgspec.json.Decoder(float_hook=str).decode
_encode = msgspec.json.Encoder().encode


class Redactor:
    """Replaces secrets by `[redacted KIND]`; `counts` has how many of each kind so far."""

    def __init__(self, counts: dict[str, int] | None = None) -> None:
        self.counts: Counter[str] = Counter(counts or {})

    def text(self, text: str) -> str:
        """The text without its secrets; the same object when there are none."""
        if not any(hint in text for hint in _HINTS):
            return text
        return _PATTERN.sub(self._replace, text)

    def item(self, item: bytes) -> bytes:
        """An item, as JSON text, without its secrets; the same bytes when there are none.

        The shapes have no character that JSON must escape, so the JSON text itself is searched.
        """
        text = item.decode()
        redacted = self.text(text)
        if _ASCII_ESCAPE.search(item) is not None:
            # Letters may be escaped without need; then a secret only shows in the plain spelling.
            plain = _encode(_decode(redacted)).decode()
            redacted_plain = self.text(plain)
            if redacted_plain != plain:
                return redacted_plain.encode()
        return item if redacted is text else redacted.encode()

    def _replace(self, match: re.Match[str]) -> str:
        kind = match.lastgroup or "secret"
        self.counts[kind] += 1
        return f"[redacted {kind}]"
