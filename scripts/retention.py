"""What share of a compacted history is still findable afterwards, offline, in 20 000 tokens.

    scripts/bench retention [--json] [--no-corpus]

Measured over the histories in tests/data/histories and over the corpus where it lies beside the
project. The ground truth is taken from the compacted entries by a walk over their JSON in this
file, which shares no code with the evidence that it judges:

last_request          the last thing that the user said, found word for word; those of more than
                      4 000 tokens are left out and counted beside
written_paths         path arguments of calls whose tool writes, files of patches, `> file`
read_paths            path arguments of calls whose tool reads
commands              the first 200 characters of each different shell command; a block of shell in
                      a message counts where `<returncode>` answers it
commands_with_status  those whose output states a number as exit status: the command again, and
                      the number after `exit`, `status` or `code` in the same line
urls, numbers         each different one in any text; numbers of two digits or more
numbers_in_messages   the numbers that people and models wrote, without those in tool output

Found is what stands in the texts of the new history's items. Runs of white space count as one space
in commands; the indentation of quoted lines is taken away before a request is looked for. Shares
are of all facts of all histories together.

Then one session is compacted fifteen times, with one hand-made history after the other as its new
messages: what of each round is findable right after it, and what of all rounds so far.

Last figures, hand-made and corpus together (153 histories, on any machine the same): last_request
100 %, written_paths 100 %, commands_with_status 96 %, commands 27 %, read_paths 96 %, urls 87 %,
numbers 40 %, numbers_in_messages 77 %.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio
from scripts.histories import Item, hand_made, of_corpus

from recapd.daemon.compaction.pipeline import Settings, divide, prepare
from recapd.daemon.compaction.summarise.offline import OfflineSummariser
from recapd.daemon.compaction.tokens import count_tokens
from recapd.protocol.errors import ResultTooLarge
from recapd.protocol.items import is_array, is_object
from recapd.storage.entry import Entry, Reminder

ROOT = Path(__file__).resolve().parent.parent

CONTEXT_LIMIT = 20_000
REQUEST_TOKENS_MAX = 4_000
COMMAND_CHARACTERS = 200
ROUNDS = 15

GOALS = {
    "last_request": 1.0,
    "written_paths": 0.95,
    "commands_with_status": 0.8,
    "commands": None,
    "read_paths": None,
    "urls": None,
    "numbers": None,
    "numbers_in_messages": None,
}
"""What is to be reached, where a goal is set."""

_WRITING_TOOL = re.compile(r"write|edit|create|insert|replace|patch|append", re.IGNORECASE)
_READING_TOOL = re.compile(r"read|view|open|cat\b", re.IGNORECASE)
_PATH_MEMBER = re.compile(r"(?:^|_)(?:path|file|filename)$", re.IGNORECASE)
_PATCHED = re.compile(r"^\*\*\* (?:Add|Update|Delete) File: (.+)$", re.MULTILINE)
_REDIRECTED = re.compile(r"(?:^|\s)>{1,2} ?([\w./-]*[\w-]\.\w+)(?=\s|$)", re.MULTILINE)
_SHELL_BLOCK = re.compile(r"^```\w*(?:bash|sh)\w*\n(.+?)\n```", re.DOTALL | re.MULTILINE)
_STATED_STATUS = re.compile(
    r"(?:exit(?:ed)?(?: with)?[ _](?:code|status)|<returncode>|\"exit_?code\"|returncode)"
    r"[\"'\s:=]{0,3}(\d{1,3})\b",
    re.IGNORECASE,
)
_URL = re.compile(r"https?://[^\s\"'<>()\\`]+")
_NUMBER = re.compile(r"(?<![\w.,])\d[\d,]*\d(?:\.\d+)?(?![\w.,]*\w)|(?<![\w.,])\d\.\d+(?![\w.]*\w)")


@dataclass
class Truth:
    """What a compacted part holds."""

    last_request: list[str] = field(default_factory=list[str])
    written_paths: set[str] = field(default_factory=set[str])
    read_paths: set[str] = field(default_factory=set[str])
    commands: set[str] = field(default_factory=set[str])
    commands_with_status: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    urls: set[str] = field(default_factory=set[str])
    numbers: set[str] = field(default_factory=set[str])
    numbers_in_messages: set[str] = field(default_factory=set[str])


Shares = dict[str, tuple[int, int]]
"""Of each kind of fact how many were found, and how many there are."""


def truth_of(items: Sequence[Item]) -> Truth:
    """All facts of `items`."""
    truth = Truth()
    outputs = {key: "\n".join(strings(value)) for key, value in _outputs(items)}
    for item, following in zip(items, [*items[1:], {}], strict=True):
        said = list(_said(item))
        if item.get("role") == "user" and said and not said[0].startswith("<returncode>"):
            truth.last_request = said
        for text in said:
            truth.numbers_in_messages |= set(_NUMBER.findall(text))
        outcome = "".join(_said(following))
        if item.get("role") == "assistant" and outcome.startswith("<returncode>"):
            for command in _SHELL_BLOCK.findall("\n".join(said)):
                _judge(truth, "shell", {"command": command}, outcome)
        for text in strings(item):
            if len(text) < 1_000_000:  # not an image
                truth.urls |= {url.rstrip(".,;:!?*]}") for url in _URL.findall(text)}
                truth.numbers |= set(_NUMBER.findall(text))
        for call_id, name, arguments in _calls(item):
            _judge(truth, name, arguments, outputs.get(call_id, ""))
    return truth


def _judge(truth: Truth, name: str, arguments: Any, output: str) -> None:
    members = arguments if is_object(arguments) else {}
    paths = {
        value
        for member, value in members.items()
        if _PATH_MEMBER.search(member) and isinstance(value, str) and 0 < len(value) < 300
    }
    command = members.get("command") or members.get("cmd")
    if is_array(command):
        command = command[-1] if command[1:2] == ["-lc"] else " ".join(map(str, command))
    if paths and isinstance(command, str):  # the editor that takes `view` or `create` as command
        (truth.read_paths if command == "view" else truth.written_paths).update(paths)
    elif _WRITING_TOOL.search(name) and "todo" not in name.lower():
        truth.written_paths |= paths
    elif _READING_TOOL.search(name):
        truth.read_paths |= paths
    for text in strings(arguments):
        truth.written_paths |= {path.strip() for path in _PATCHED.findall(text)}
    if isinstance(command, str) and command.strip() and not paths:
        start = squeeze(command)[:COMMAND_CHARACTERS]
        truth.commands.add(start)
        truth.written_paths |= set(_REDIRECTED.findall(command))
        statuses = _STATED_STATUS.findall(output[:300]) or _STATED_STATUS.findall(output[-300:])
        if statuses:
            truth.commands_with_status.add((start, statuses[-1]))


def found_in(texts: Iterable[str], truth: Truth) -> Shares:
    """How much of `truth` stands in `texts`."""
    text = "\n".join(texts)
    plain = text.replace("&lt;", "<")
    unindented = plain.replace("\n  ", "\n")
    unescaped = plain.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"')
    squeezed = squeeze(plain) + "\n" + squeeze(unescaped)
    lines = [squeeze(line.replace("\\n", " ").replace("\\t", " ")) for line in plain.split("\n")]
    numbers = set(_NUMBER.findall(text))
    short = count_tokens("\n".join(truth.last_request)).count <= REQUEST_TOKENS_MAX
    asked = bool(truth.last_request) and short
    whole = all(part in plain or part in unindented for part in truth.last_request)
    return {
        "last_request": (int(asked and whole), int(asked)),
        "written_paths": _share(truth.written_paths, lambda path: path in plain),
        "commands_with_status": _share(
            truth.commands_with_status,
            lambda pair: any(
                pair[0] in line and re.search(rf"(?:exit|status|code)\W{{1,3}}{pair[1]}\b", line)
                for line in lines
            ),
        ),
        "commands": _share(truth.commands, lambda command: command in squeezed),
        "read_paths": _share(truth.read_paths, lambda path: path in plain),
        "urls": _share(truth.urls, lambda url: url in plain),
        "numbers": _share(truth.numbers, lambda number: number in numbers),
        "numbers_in_messages": _share(truth.numbers_in_messages, lambda number: number in numbers),
    }


_Fact = TypeVar("_Fact")


def _share(facts: set[_Fact], is_found: Callable[[_Fact], bool]) -> tuple[int, int]:
    return sum(1 for fact in facts if is_found(fact)), len(facts)


def squeeze(text: str) -> str:
    """`text` with each run of white space as one space."""
    return " ".join(text.split())


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, those inside JSON text that is a string too."""
    if isinstance(value, str):
        yield value
        if value[:1] in ("{", "["):
            try:
                yield from strings(json.loads(value))
            except ValueError:
                pass
    elif is_object(value):
        for member in value.values():
            yield from strings(member)
    elif is_array(value):
        for member in value:
            yield from strings(member)


def _said(item: Item) -> Iterator[str]:
    """The texts of a message that a person or a model wrote, reminders left out."""
    if item.get("role") not in ("user", "assistant") or item.get("type", "message") != "message":
        return
    content = item.get("content")
    for part in content if is_array(content) else [content]:
        if is_object(part) and part.get("type") in ("text", "input_text", "output_text"):
            part = part.get("text")
        if isinstance(part, str) and part.strip():
            if not part.lstrip().startswith("<system-reminder>"):
                yield part


def _parts(item: Item) -> list[Item]:
    content = item.get("content")
    parts = content if is_array(content) else []
    return [part for part in parts if is_object(part)]


def _calls(item: Item) -> Iterator[tuple[str, str, Any]]:
    """Call id, tool name and arguments."""
    candidates: list[Item] = [item, *_parts(item), *(item.get("tool_calls") or [])]
    for call in candidates:
        function = call.get("function")
        inner = function if is_object(function) else call
        arguments = inner.get("arguments", inner.get("input"))
        name = inner.get("name")
        if isinstance(name, str) and arguments is not None:
            if isinstance(arguments, str):
                try:
                    arguments = json.loads(arguments)
                except ValueError:
                    pass
            yield str(call.get("call_id") or call.get("id")), name, arguments


def _outputs(items: Sequence[Item]) -> Iterator[tuple[str, Any]]:
    for item in items:
        if "output" in item:
            yield str(item.get("call_id")), item["output"]
        if item.get("role") == "tool":
            yield str(item.get("tool_call_id")), item.get("content")
        for part in _parts(item):
            if part.get("type") == "tool_result":
                yield str(part.get("tool_use_id")), part.get("content")


async def measure(items: Sequence[Item], context_limit: int) -> Shares | None:
    """The shares after one offline compaction; None where the result would be too large."""
    history = [
        Entry(number, number, json.dumps(item, ensure_ascii=False).encode())
        for number, item in enumerate(items, start=1)
    ]
    parts = await divide(history)
    settings = Settings(context_limit=context_limit)
    try:
        plan = await prepare(parts, summarise=OfflineSummariser(), settings=settings)
    except ResultTooLarge:
        return None
    compacted = [json.loads(entry.item) for entry in parts.body]
    built = plan.build(len(history) + 1, 0, None)
    texts = [text for entry in built for text in strings(json.loads(entry.item))]
    return found_in(texts, truth_of(compacted))


@dataclass(frozen=True)
class Round:
    """One of several compactions of the same session."""

    tokens: int
    reminders: int
    shares: Shares  # of what was compacted in this round
    shares_so_far: Shares  # of what was compacted in this and all earlier ones


async def measure_rounds(histories: Sequence[Sequence[Item]], context_limit: int) -> list[Round]:
    """Compact `ROUNDS` times; `histories` in turn are what is appended before each."""
    settings = Settings(context_limit=context_limit)
    history: list[Entry] = []
    truths: list[Truth] = []
    rounds: list[Round] = []
    next_id = 1
    for number in range(ROUNDS):
        for item in histories[number % len(histories)]:
            if item.get("role") not in ("system", "developer"):  # those would stay and pile up
                history.append(Entry(next_id, next_id, json.dumps(item).encode()))
                next_id += 1
        parts = await divide(history, settings)
        plan = await prepare(parts, summarise=OfflineSummariser(), settings=settings)
        history = plan.build(next_id, 0, Reminder(number + 1, f"round-{number}", number + 1))
        next_id += 1
        texts = [text for entry in history for text in strings(json.loads(entry.item))]
        truths.append(truth_of([json.loads(entry.item) for entry in parts.body]))
        rounds.append(
            Round(
                plan.tokens_after.count,
                sum(entry.reminder is not None for entry in history),
                found_in(texts, truths[-1]),
                add(found_in(texts, truth) for truth in truths),
            )
        )
    return rounds


def table_of_rounds(rounds: Sequence[Round]) -> Iterator[str]:
    """The lines of a table with a row for each round."""
    kinds = [*GOALS]
    yield f"{len(rounds)} compactions in a row; shares in percent, of this round / of all so far"
    yield "  round  tokens  reminders  " + "  ".join(f"{kind[:20]:>20}" for kind in kinds)
    for number, one in enumerate(rounds, start=1):
        shares = (
            f"{100 * ratio(one.shares[kind]):.1f} / {100 * ratio(one.shares_so_far[kind]):.1f}"
            for kind in kinds
        )
        row = f"  {number:>5}  {one.tokens:>6}  {one.reminders:>9}  "
        yield row + "  ".join(f"{share:>20}" for share in shares)


def add(shares: Iterable[Shares]) -> Shares:
    """The sums, kind by kind."""
    total = {kind: (0, 0) for kind in GOALS}
    for one in shares:
        for kind, (found, there) in one.items():
            total[kind] = (total[kind][0] + found, total[kind][1] + there)
    return total


def ratio(share: tuple[int, int]) -> float:
    """As a share of 1; of nothing, everything was found."""
    return round(share[0] / share[1], 4) if share[1] else 1.0


def table(name: str, histories: dict[str, Shares]) -> Iterator[str]:
    """The lines of a table of one group of histories."""
    total = add(histories.values())
    yield f"{name}: {len(histories)} histories"
    yield f"  {'kind':<22}{'found':>9}{'of':>8}{'share':>9}{'goal':>8}"
    for kind, goal in GOALS.items():
        found, there = total[kind]
        percent = f"{100 * ratio((found, there)):.1f} %" if there else "-"
        wanted = f"{100 * goal:.0f} %" if goal is not None else ""
        yield f"  {kind:<22}{found:>9}{there:>8}{percent:>9}{wanted:>8}"


async def main() -> int:
    """Measure and print; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="scripts/bench retention")
    parser.add_argument("--json", action="store_true", help="print the shares as JSON")
    parser.add_argument("--no-corpus", action="store_true", help="only the hand-made histories")
    parser.add_argument("--each", action="store_true", help="a table for each history too")
    options = parser.parse_args()
    groups = {"hand-made": list(hand_made(ROOT / "tests/data/histories"))}
    if not options.no_corpus:
        groups["corpus"] = list(of_corpus(ROOT.parent / "shared/corpus"))
        if not groups["corpus"]:
            print("the corpus is not here: only the hand-made histories", file=sys.stderr)
    measured: dict[str, dict[str, Shares]] = {}
    refused: list[str] = []
    for group, histories in groups.items():
        measured[group] = {}
        for name, items in histories:
            shares = await measure(items, CONTEXT_LIMIT)
            if shares is None:
                refused.append(name)
            else:
                measured[group][name] = shares
    total = add(shares for histories in measured.values() for shares in histories.values())
    missed = [kind for kind, goal in GOALS.items() if goal and ratio(total[kind]) < goal]
    if options.json:
        print(json.dumps({"retention": {kind: ratio(share) for kind, share in total.items()}}))
        return int(bool(missed))
    for group, shares_of in measured.items():
        if options.each:
            for name, shares in shares_of.items():
                print("\n".join(table(name, {name: shares})))
        if shares_of:
            print("\n".join((*table(group, shares_of), "")))
    rounds = await measure_rounds([items for _, items in groups["hand-made"]], CONTEXT_LIMIT)
    print("\n".join((*table_of_rounds(rounds), "")))
    if refused:
        print(f"too large for {CONTEXT_LIMIT} tokens, so not compacted: {', '.join(refused)}")
    print(f"missed: {', '.join(missed)}" if missed else "all goals reached")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(anyio.run(main))
