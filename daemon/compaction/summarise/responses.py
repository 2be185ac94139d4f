"""OpenAI's Responses API: `POST /responses`."""

from recapd.daemon.compaction.summarise.provider import (
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


class Responses(Provider):
    """Nothing is stored at the provider, and nothing is looked up there."""

    name = "responses"
    path = "responses"

    def headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def body(self, model: str, prompt: Prompt, *, stream: bool) -> Json:
        content = [{"type": "input_text", "text": prompt.content}]
        return {
            "model": model,
            "instructions": prompt.instructions,
            "input": [{"type": "message", "role": "user", "content": content}],
            "max_output_tokens": prompt.output_tokens_max,
            "store": False,
            "stream": stream,
        }

    def reading(self) -> Reading:
        return _Reading()


class _Reading(Reading):
    def take(self, event: Json) -> None:
        match event.get("type"):
            case "response.output_text.delta":
                self.add(event.get("delta"))
            case "response.refusal.delta" | "response.refusal.done":
                self.end("refusal")
            case "response.completed" | "response.incomplete" | "response.failed":
                self.take_whole(object_member(event, "response"))
                self.finished = True
            case "error":
                # Documented flat; sent with an `error` inside, too.
                raise reported(event.get("error") or event, text_came=bool(self.characters))
            case _:
                pass

    def take_whole(self, body: Json) -> None:
        self.usage = Usage(
            tokens(member(body, "usage", "input_tokens")),
            tokens(member(body, "usage", "input_tokens_details", "cached_tokens")),
            tokens(member(body, "usage", "output_tokens")),
        )
        if body.get("error") or body.get("status") == "failed":
            raise reported(body.get("error"), text_came=bool(self.characters))
        pieces: list[str] = []
        for item in objects(body.get("output")):
            match item.get("type"):
                case "message":
                    pieces += self._texts(item)
                case "reasoning":
                    self.reasoning = True
                case str(kind) if kind.endswith("_call"):
                    self.end("tool_call")
                case _:
                    pass
        self.replace(pieces)
        match body.get("status"):
            case "completed":
                self.end("complete")
            case "incomplete":
                filtered = member(body, "incomplete_details", "reason") == "content_filter"
                self.end("refusal" if filtered else "cut_off")
            case _:
                pass

    def _texts(self, message: Json) -> list[str]:
        texts: list[str] = []
        for part in objects(message.get("content")):
            if part.get("type") == "refusal":
                self.end("refusal")
            elif isinstance(text := part.get("text"), str):
                texts.append(text)
        return texts
