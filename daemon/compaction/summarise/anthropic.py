"""Anthropic's Messages API: `POST /messages`."""

from typing import Final

from recapd.daemon.compaction.summarise.provider import (
    Ending,
    Json,
    Prompt,
    Provider,
    Reading,
    member,
    object_member,
    objects,
    reported,
    tokens,
)
from recapd.protocol.messages import Usage

VERSION: Final = "2023-06-01"
"""Of the API; newer ones have not been published."""

_ENDINGS: Final[dict[str, Ending]] = {
    "end_turn": "complete",
    "stop_sequence": "complete",
    "tool_use": "tool_call",
    "pause_turn": "tool_call",
    "refusal": "refusal",
    "max_tokens": "cut_off",
    "model_context_window_exceeded": "cut_off",
}


class Anthropic(Provider):
    """Nothing is kept at the provider in this API."""

    name = "anthropic"
    path = "messages"

    def headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": VERSION}

    def body(self, model: str, prompt: Prompt, *, stream: bool) -> Json:
        return {
            "model": model,
            "system": prompt.instructions,
            "messages": [{"role": "user", "content": [{"type": "text", "text": prompt.content}]}],
            "max_tokens": prompt.output_tokens_max,
            "stream": stream,
        }

    def reading(self) -> Reading:
        return _Reading()


class _Reading(Reading):
    def __init__(self) -> None:
        super().__init__()
        self._ending: Ending | None = None  # told before the end itself

    def take(self, event: Json) -> None:
        match event.get("type"):
            case "message_start":
                self._take_usage(member(event, "message", "usage"))
            case "content_block_start":
                self._take_block(object_member(event, "content_block"))
            case "content_block_delta":
                self.add(member(event, "delta", "text"))
            case "message_delta":
                self._take_usage(event.get("usage"))
                self._ending = _ending(member(event, "delta", "stop_reason")) or self._ending
            case "message_stop":
                self.finished = True
                if self._ending is not None:
                    self.end(self._ending)
            case "error":
                raise reported(event.get("error"), text_came=bool(self.characters))
            case _:
                pass

    def take_whole(self, body: Json) -> None:
        if body.get("type") == "error":
            raise reported(body.get("error"))
        self._take_usage(body.get("usage"))
        for block in objects(body.get("content")):
            self._take_block(block)
        ending = _ending(body.get("stop_reason"))
        if ending is not None:
            self.end(ending)

    def _take_block(self, block: Json) -> None:
        match block.get("type"):
            case "text":
                self.add(block.get("text"))
            case "thinking" | "redacted_thinking":
                self.reasoning = True
            case str(kind) if kind.endswith("tool_use"):
                self.end("tool_call")
            case _:
                pass

    def _take_usage(self, usage: object) -> None:
        """Input comes first, in three parts that are apart; output grows from event to event."""
        cached = tokens(member(usage, "cache_read_input_tokens"))
        parts = [
            tokens(member(usage, "input_tokens")),
            tokens(member(usage, "cache_creation_input_tokens")),
            cached,
        ]
        known = [part for part in parts if part is not None]
        before = self.usage
        output = tokens(member(usage, "output_tokens"))
        self.usage = Usage(
            before.input_tokens if parts[0] is None else sum(known),
            before.cached_tokens if cached is None else cached,
            before.output_tokens if output is None else output,
        )


def _ending(reason: object) -> Ending | None:
    return _ENDINGS.get(reason, "cut_off") if isinstance(reason, str) else None
