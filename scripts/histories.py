"""Histories to measure with, as lists of items: the hand-made ones, and those of the corpus.

Formats that are lists of Responses items or Chat Completions messages are taken as they are.
Session files of Claude Code, Droid, Cursor, Amp and pi are read only as far as a measurement needs.
Left out are those that would take a real importer: Gemini, Copilot, LangChain, OpenCode, Windsurf,
Qwen, ACP and ochat.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recapd.protocol.items import is_array, is_object

Item = dict[str, Any]

CLAUDE_CODE_LIKE = (
    "04-claude-code-tool-heavy/session.jsonl",
    "05-claude-code-giant-line/session.jsonl",
    "06-claude-code-image-result/session.jsonl",
    "07-claude-code-edge-cases/representative_messages.jsonl",
    "07-claude-code-edge-cases/todowrite_examples.jsonl",
    "07-claude-code-edge-cases/system_reminder.jsonl",
    "23-other-agents/claude-code-with-thinking.jsonl",
    "23-other-agents/cursor-session.jsonl",
    "23-other-agents/droid-session.jsonl",
    "23-other-agents/example-claude-code.jsonl",
)


def hand_made(folder: Path) -> Iterator[tuple[str, list[Item]]]:
    """Name and items of each `*.jsonl` in `folder`."""
    for file in sorted(folder.glob("*.jsonl")):
        yield file.stem, _lines(file)


def of_corpus(corpus: Path) -> Iterator[tuple[str, list[Item]]]:
    """Name and items of each history of the corpus that can be read here; none where it is not."""
    if not corpus.is_dir():
        return
    for name in CLAUDE_CODE_LIKE:
        yield _label(name), _messages(_lines(corpus / name))
    yield "08-pi", _of_pi(_lines(corpus / "08-pi-two-compactions/session.jsonl"))
    for file in sorted((corpus / "10-swe-agent-chat").glob("*.json")):
        yield f"10-{file.name.split('.')[0]}", _of_swe_agent(_load(file)["history"])
    for file in sorted((corpus / "11-mini-swe-agent").glob("*.json")):
        chat = _load(file)
        yield f"11-{file.name.split('.')[0]}", chat if is_array(chat) else chat["messages"]
    sessions = _load(corpus / "12-tau-bench-airline/trajectories-first-90.json")
    for number, session in enumerate(sessions):
        yield f"12-tau-{number:02}", session["traj"]
    for file in sorted(corpus.glob("1[3-7]-*/*.items.json")):
        yield f"{file.parent.name[:2]}-{file.name.removesuffix('.items.json')[5:]}", _load(file)
    yield "23-amp", _load(corpus / "23-other-agents/amp-thread.json")["messages"]


def _label(name: str) -> str:
    return f"{name[:2]}-{name.rpartition('/')[2].removesuffix('.jsonl')}"


def _load(file: Path) -> Any:
    return json.loads(file.read_text("utf-8"))


def _lines(file: Path) -> list[Item]:
    values = (json.loads(line) for line in file.read_text("utf-8").split("\n") if line.strip())
    return [value for value in values if is_object(value)]


def _messages(records: list[Item]) -> list[Item]:
    """The messages inside the records of a session file, with role and content only."""
    found: list[Item] = []
    for record in records:
        message = record.get("message")
        if is_object(message):
            role = message.get("role") or record.get("role")
            if role in ("user", "assistant", "system"):
                found.append({"role": role, "content": message.get("content")})
    return found


def _of_pi(records: list[Item]) -> list[Item]:
    """Responses items; a call that was never answered is answered by `aborted`, as it was."""
    items: list[Item] = []
    messages: list[Item] = [record["message"] for record in records if record.get("message")]
    answered = {message.get("toolCallId") for message in messages}
    for message in messages:
        role, content = message["role"], message.get("content", [])
        if role == "user":
            items.append({"role": "user", "content": content})
        elif role == "assistant":
            items += _of_pi_assistant(content, answered)
        elif role == "toolResult":
            call_id = message["toolCallId"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": content})
    return items


def _of_pi_assistant(content: list[Item], answered: set[Any]) -> Iterator[Item]:
    for part in content:
        if part["type"] == "text":
            yield {"role": "assistant", "content": part["text"]}
        elif part["type"] == "toolCall":
            arguments = json.dumps(part["arguments"], ensure_ascii=False)
            yield {
                "type": "function_call",
                "call_id": part["id"],
                "name": part["name"],
                "arguments": arguments,
            }
            if part["id"] not in answered:
                yield {
                    "type": "function_call_output",
                    "call_id": part["id"],
                    "output": "aborted",
                }


def _of_swe_agent(messages: list[Item]) -> list[Item]:
    """Its tool messages name their calls in a list, with one in it."""
    return [
        message | {"tool_call_id": message["tool_call_ids"][0]}
        if message.get("role") == "tool" and message.get("tool_call_ids")
        else message
        for message in messages
    ]
