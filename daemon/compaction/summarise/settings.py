"""How a model is asked: one table of the configuration for each form of asking."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from recapd.protocol.errors import CompactionFailed

Kind = Literal["responses", "chat", "anthropic"]

_BASE_URLS: Final[dict[Kind, str]] = {
    "responses": "https://api.openai.com/v1",
    "anthropic": "https://api.anthropic.com/v1",
}


def _member(default: Any, text: str, *, least: int = 1) -> Any:
    return field(default=default, metadata={"text": text, "least": least})


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineSettings:
    """One summariser that asks a model. At most one of the three places for the key is set.

    A source too long for one request takes several, and an answer that is refused one more.
    """

    kind: Kind
    model: str = _member("", "name of the model; there is none by default")
    base_url: str = _member("", "up to `/v1`; the provider's own if empty, none for `chat`")
    key_env: str = _member("", "variable that holds the key")
    key_file: Path | None = _member(None, "file that holds the key, with mode 0600")  # noqa: RUF009
    key_command: tuple[str, ...] = _member((), "command that prints the key, as an array")
    window_tokens: int = _member(128_000, "what the model can read and write together", least=4_000)
    output_tokens_max: int = _member(8_000, "of an answer, with what the model thinks", least=100)
    attempt_timeout_s: float = _member(120, "time in which a byte must come", least=1)
    deadline_s: float = _member(600, "time for a request with all its attempts", least=1)
    stream: bool = _member(True, "whether the answer comes in pieces")

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
