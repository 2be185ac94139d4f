"""Chat Completions, as vLLM, llama.cpp, Ollama and others offer it: `POST /chat/completions`.

Only members that all of them know are sent: strict ones refuse others, `store` for instance.
"""

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

_ENDINGS: Final[dict[str, Ending]] = {
    "stop": "complete",
    "length": "cut_off",
    "tool_calls": "tool_call",
    "function_call": "tool_call",
    "content_filter": "refusal",
}


class Chat(Provider):
    """The one form that local servers share."""

    name = "chat"
    path = "chat/completions"

    def headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def body(self, model: str, prompt: Prompt, *, stream: bool) -> Json:
        body: Json = {
            "model": model,
            "messages": [
                {"role": "system", "content": prompt.instructions},
                {"role": "user", "content": prompt.content},
            ],
            "max_tokens": prompt.output_tokens_max,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        return body

    def reading(self) -> Reading:
        return _Reading()


class _Reading(Reading):
    def take(self, event: Json) -> None:
        self._take(event, "delta")

    def take_whole(self, body: Json) -> None:
        self._take(body, "message")

    def _take(self, body: Json, name: str) -> None:
        if body.get("error") or body.get("object") == "error":
            raise reported(body.get("error") or body, text_came=bool(self.characters))
        if body.get("usage"):
            self.usage = Usage(
                tokens(member(body, "usage", "prompt_tokens")),
                tokens(member(body, "usage", "prompt_tokens_details", "cached_tokens")),
                tokens(member(body, "usage", "completion_tokens")),
            )
        choice = next(objects(body.get("choices")), None)
        if choice is None:
            return
        message = object_member(choice, name)
        content = message.get("content")
        self.add(content)
        for part in objects(content):  # Mistral's reasoning models answer in parts
            if part.get("type") == "text":
                self.add(part.get("text"))
            elif part.get("type") == "thinking":
                self.reasoning = True
        if message.get("reasoning_content") or message.get("reasoning"):
            self.reasoning = True
        if message.get("tool_calls") or message.get("function_call"):
            self.end("tool_call")
        if message.get("refusal"):
            self.end("refusal")
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.end(_ENDINGS.get(reason, "cut_off"))
