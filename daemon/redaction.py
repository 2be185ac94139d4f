"""Secrets in what leaves the store: well-known shapes of keys are replaced, and what was replaced
is counted.

Stored bytes are never altered. A shape is specific enough that ordinary text does not have it; what
has no shape of its own (a password in a sentence) is not found.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from recapd.protocol.items import is_array, is_object

# Behind the first character of a word (`^` below), so that `re` looks for that, which is fast, and
# nothing long is looked at twice. Text may itself be JSON (arguments of a call): there an escape is
# no letter.
_STARTS: Final = r"(?:(?<![A-Za-z0-9_].)|(?<=\\[nrtbf].)|(?<=\\u[0-9A-Fa-f]{4}.))"

_WORDS: Final = {
    "anthropic_key": r"s^k-ant-[A-Za-z0-9_-]{20,}",
    "openai_key": r"s^k-(?:proj-|svcacct-|admin-|or-v1-)?[A-Za-z0-9_-]{20,}",
    "github_token": r"g^(?:h[pousr]_[A-Za-z0-9]{36,}|ithub_pat_[A-Za-z0-9_]{22,})",
    "gitlab_token": r"g^l(?:pat|rt|dt|cbt)-[A-Za-z0-9_-]{20,}",
    "aws_key_id": r"A^(?:KIA|SIA)[A-Z0-9]{16}\b",
    "google_key": r"(?:A^Iza[A-Za-z0-9_-]{35}|y^a29\.[A-Za-z0-9_-]{20,}|G^OCSPX-[A-Za-z0-9_-]{28})",
    "slack_token": r"x^(?:ox[abeoprs]|app)-[A-Za-z0-9-]{10,}",
    "telegram_token": r"[0-9]^[0-9]{7,9}:AA[A-Za-z0-9_-]{33}(?![A-Za-z0-9_-])",
    "stripe_key": r"(?:[rs]^k_(?:live|test)|w^hsec)_[A-Za-z0-9]{16,}",
    "sendgrid_key": r"S^G\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}",
    "twilio_key": r"S^K[0-9a-f]{32}\b",
    "npm_token": r"n^pm_[A-Za-z0-9]{36}\b",
    "pypi_token": r"p^ypi-[A-Za-z0-9_-]{50,}",
    "huggingface_token": r"h^f_[A-Za-z0-9]{34,}",
    "model_key": r"(?:g^sk_|x^ai-|p^plx-|r^8_|f^w_|c^sk-)[A-Za-z0-9]{20,}",
    "digitalocean_token": r"d^o[opr]_v1_[0-9a-f]{64}",
    "shopify_token": r"s^hp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
    "databricks_token": r"d^api[0-9a-f]{32}",
    "vault_token": r"h^v[bsr]\.[A-Za-z0-9_-]{24,}",
    "service_token": r"(?:l^in_api_|n^tn_|s^bp_|g^lsa_|d^ckr_pat_|r^ubygems_|p^scale_(?:tkn|pw)_"
    r"|s^ntry[su]_|N^RAK-|P^MAK-|A^TATT3|d^p\.pt\.)[A-Za-z0-9_=-]{24,}",
    "recapd_token": r"r^ecapd_[A-Za-z0-9_-]{43}",
    "age_key": r"A^GE-SECRET-KEY-1[0-9A-Z]{58}",
    "jwt": r"e^(?<!-.)yJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
}

_SHAPES: Final = {
    "private_key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"
    r"(?:(?:(?!-----BEGIN).){1,20000}?-----END (?:[A-Z]+ )*PRIVATE KEY-----|[A-Za-z0-9+/=\s]*)",
    **{kind: shape.replace("^", _STARTS) for kind, shape in _WORDS.items()},
    # What is `kept` is no part of the secret.
    "webhook": r"(?P<kept>hooks\.slack\.com/services/|\.com/api/webhooks/(?=[0-9]{15}))"
    r"[A-Z0-9]+/[A-Za-z0-9_/-]{24,}",
    "bearer_token": r"(?P<kept>[Bb]earer )[A-Za-z0-9._~+/-]{20,}=*",
    "basic_auth": r"(?P<kept>[Bb]asic )(?=[A-Za-z+/]*[0-9])(?=[a-z0-9+/]*[A-Z])"
    r"[A-Za-z0-9+/]{12,}={0,2}",
    "url_password": r"(?P<kept>://)[^\s/:@\"\\]{0,200}:[^\s/:@\"\\]{1,200}(?=@)",
    # A name, and what stands between it and its value: in a shell, a URL, code, JSON, JSON in JSON.
    "assigned_secret": r"(?P<kept>(?:[Pp]assw(?:or)?d|PASSW(?:OR)?D|[Ss]ecret|SECRET|[Aa]pi[Kk]ey"
    r"|(?:api|access|secret)_key|(?:API|ACCESS|SECRET|ACCOUNT)_KEY|AccountKey"
    r"|(?:access|refresh|auth)_token|_TOKEN)(?:=|: ?|\\?[\"']: ?)\\?[\"']?)"
    r"(?=[A-Za-z_~.+/%-]{0,400}[0-9])(?=[0-9_~.+/%-]{0,400}[A-Za-z])[A-Za-z0-9_~.+/%-]{16,400}={0,2}"
    r"(?![A-Za-z0-9_~.+/%({\[-])",
}
_PATTERNS: Final = {kind: re.compile(shape, re.DOTALL) for kind, shape in _SHAPES.items()}
# One of these is in every match: looking for them first is fifty times faster than the patterns.
_HINTS: Final = {
    "PRIVATE KEY": "private_key",
    "AGE-SECRET": "age_key",
    "sk-ant-": "anthropic_key",
    "sk-": "openai_key",
    **dict.fromkeys(("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"), "github_token"),
    **dict.fromkeys(("glpat-", "glrt-", "gldt-", "glcbt-"), "gitlab_token"),
    **dict.fromkeys(("AKIA", "ASIA"), "aws_key_id"),
    **dict.fromkeys(("AIza", "ya29.", "GOCSPX-"), "google_key"),
    **dict.fromkeys(("xox", "xapp-"), "slack_token"),
    **dict.fromkeys(("hooks.slack", "webhooks/"), "webhook"),
    ":AA": "telegram_token",
    **dict.fromkeys(("k_live_", "k_test_", "whsec_"), "stripe_key"),
    "SG.": "sendgrid_key",
    "SK": "twilio_key",
    "npm_": "npm_token",
    "pypi-": "pypi_token",
    "hf_": "huggingface_token",
    **dict.fromkeys(("gsk_", "xai-", "pplx-", "r8_", "fw_", "csk-"), "model_key"),
    "_v1_": "digitalocean_token",
    "shp": "shopify_token",
    "dapi": "databricks_token",
    **dict.fromkeys(("hvs.", "hvb.", "hvr."), "vault_token"),
    **dict.fromkeys(
        (
            "lin_api_",
            "ntn_",
            "sbp_",
            "glsa_",
            "dckr_pat_",
            "rubygems_",
            "pscale_",
            "sntry",
            "NRAK-",
        ),
        "service_token",
    ),
    **dict.fromkeys(("PMAK-", "ATATT3", "dp.pt."), "service_token"),
    "recapd_": "recapd_token",
    "eyJ": "jwt",
    "earer ": "bearer_token",
    "asic ": "basic_auth",
    "://": "url_password",
    **dict.fromkeys(
        ("assw", "ASSW", "ecret", "ECRET", "pi_key", "PI_KEY", "ess_key"), "assigned_secret"
    ),
    **dict.fromkeys(
        ("ESS_KEY", "NT_KEY", "piKey", "pikey", "ccountKey", "_token", "_TOKEN"), "assigned_secret"
    ),
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
        return self._text(text, _HINTS)

    def _text(self, text: str, hints: Iterable[str]) -> str:
        kinds = {_HINTS[hint] for hint in hints if hint in text}
        for kind, pattern in _PATTERNS.items() if kinds else ():
            if kind in kinds and (kind != "url_password" or "@" in text):
                text = pattern.sub(partial(self._replace, kind), text)
        return text

    def _replace(self, kind: str, match: re.Match[str]) -> str:
        if self._seen is None or match[0] not in self._seen:
            self.counts[kind] += 1
        if self._seen is not None:
            self._seen.add(match[0])
        kept = match["kept"] if match.re.groups else ""
        return f"{kept}[redacted {kind}]"

    def item(self, item: bytes) -> bytes:
        """An item, as JSON text, without its secrets; the same bytes when there are none.

        Each string is looked at as what it says, for in JSON text an escape may stand in front of a
        secret, or in it. An item that has one is written anew, numbers as they were.
        """
        hints: Sequence[str] = [*_HINTS]
        if _ASCII_ESCAPE.search(item) is None:
            text = item.decode()
            hints = [hint for hint in hints if hint in text]
            if not hints:
                return item
        found = self.counts.total()
        value = self._value(decode_item(item), hints)
        return item if self.counts.total() == found else encode_item(value)

    def _value(self, value: Any, hints: Sequence[str]) -> Any:
        if isinstance(value, str):
            return self._text(value, hints)
        if is_array(value):
            return [self._value(one, hints) for one in value]
        if is_object(value):
            return {
                self._text(name, hints): self._value(member, hints)
                for name, member in value.items()
            }
        return value
