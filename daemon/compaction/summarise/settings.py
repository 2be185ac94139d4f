"""How a model is asked: one table of the configuration for each form of asking."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from recapd.protocol.errors import CompactionFailed

Kind = Literal["responses", "chat", "anthropic"]

_BASE_URLS: Final[dict[Kind, str]] = {
    "responses": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com/v1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSettings:
    """One summariser that asks a model. At most one of the three places for the key is set.

    Output counts what a model thinks, too. `attempt_timeout_s` is the time in which a byte must
    come, `deadline_s` that of a request with all its attempts. A source too long for one request
    takes several, and an answer that is refused one more.
    """

    kind: Kind
    model: str = ""  # there is no default: asking a model without naming it is an error
    base_url: str = ""  # up to what all paths begin with, `/v1` mostly; empty: the provider's own
    key_env: str = ""  # name of a variable
    key_file: Path | None = None  # readable by its owner alone
    key_command: tuple[str, ...] = ()  # prints the key
    window_tokens: int = 128_000
    output_tokens_max: int = 8_000
    attempt_timeout_s: float = 120
    deadline_s: float = 600
    stream: bool = True

    def checked(self) -> "OnlineSettings":
        """The settings with their base URL.

        Raises:
            CompactionFailed: something is missing or cannot be used (stage `configure`).
        """
        if not self.model:
            raise CompactionFailed(
                stage="configure", hint="Set `model` in the table of this summarizer."
            )
        if sum(map(bool, (self.key_env, self.key_file, self.key_command))) > 1:
            raise CompactionFailed(
                stage="configure", hint="Set one of `key_env`, `key_file` and `key_command`."
            )
        base_url = self.base_url or _BASE_URLS.get(self.kind, "")
        if not _is_plain(base_url):
            raise CompactionFailed(
                stage="configure",
                hint="Set `base_url` to http:// or https:// with a host, and without a user,"
                " a query or a fragment.",
            )
        return replace(self, base_url=base_url.rstrip("/"))

    @property
    def is_local(self) -> bool:
        """Whether the base URL names this machine, for which no proxy is asked."""
        host = urlsplit(self.base_url).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")


def _is_plain(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and "@" not in parts.netloc
        and not parts.query
        and not parts.fragment
        and url.isascii()
        and url.isprintable()
        and " " not in url
    )
