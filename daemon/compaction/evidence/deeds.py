"""What a tool call does: runs a command, writes a file, reads one, or searches.

The name of a tool and the names of its arguments decide, since agents agree on neither: `Edit` with
`file_path`, `str_replace_editor` with `command: "create"`, `apply_patch` with a patch, `shell` with
an argv list. A patch is known by its headers, also inside a shell command.
"""

import re
import shlex
from collections.abc import Iterator
from enum import Enum
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from recapd.daemon.compaction.evidence.read import Call
from recapd.protocol.items import is_array, is_object


class Deed(Enum):
    """Kinds of what a call does."""

    RUN = "run"
    WRITE = "write"
    READ = "read"
    SEARCH = "search"


TEXT_CHARACTERS_MAX = 50_000
"""Of a patch or a command that are looked through for paths."""

_COMMANDS = ("command", "cmd", "commands", "script", "CommandLine")
_PATHS = frozenset(
    {
        *("file_path", "path", "filename", "filepath", "filePath", "file", "target_file"),
        *("notebook_path", "relative_path", "absolute_path", "relative_workspace_path"),
        *("TargetFile", "AbsolutePath", "new_path", "paths", "files", "file_paths"),
    }
)
_QUERIES = frozenset({"pattern", "query", "search_term", "regex", "queries", "file_name", "Query"})
_CONTENTS = frozenset(
    {
        *("content", "contents", "new_string", "newText", "new_str", "old_str", "old_string"),
        *("edits", "diff", "file_text", "insert_text", "new_source", "code_edit", "replacement"),
    }
)
_RUNS = re.compile(r"bash|shell|exec|terminal|run_?command|^cmd$|^run$|^sh$", re.IGNORECASE)
_WRITES = re.compile(
    r"write|edit|create|insert|replace|patch|append|update|save|delete|remove|rename|move|undo",
    re.IGNORECASE,
)
_SEARCHES = re.compile(r"grep|glob|find|search|^rg$|^ls$|list|tree", re.IGNORECASE)
_READS = re.compile(r"read|view|open|cat|get|fetch|load|image", re.IGNORECASE)
_VIEW = frozenset({"view", "read", "open", "list", "search"})

_PATCHED = re.compile(
    r"^\*\*\* (?:(?:Add|Update|Delete) File|Move to): ([^\r\n]+)"
    r"|^\+\+\+ (?:b/)?([^\t\r\n]+)",
    re.MULTILINE,
)
# `> file`, `>> file` and `tee file`; not `2>&1`, `->`, `=>` or a comparison in an awk program.
_REDIRECTED = re.compile(
    r"(?:(?<![-=<>&\w])[12]?>{1,2}\|?\s*|\btee\s+(?:-a\s+)?)"
    r"(\"[^\"\n]{1,300}\"|'[^'\n]{1,300}'|[\w./~$@{}+-][^\s;&|<>()'\"`]{0,300})"
)
_EDITOR = re.compile(r"\b(?:sed|perl)(?=[ \t])")
_EDITOR_WORD = re.compile(r"[ \t]{1,9}('[^']{0,500}'|\"[^\"]{0,500}\"|[^\s|;&<>'\"]{1,300})")
_EDITORS_MAX = _EDITOR_WORDS_MAX = 20


class _Tool(NamedTuple):
    """What the name of a tool tells of it."""

    runs: bool
    writes: bool
    searches: bool
    reads: bool


@lru_cache(maxsize=1024)
def _tool(name: str) -> _Tool:
    # The tool's own name in `mcp__server__tool`, `functions.tool` and `server/tool`.
    name = re.split(r"__|[./:]", name)[-1]
    return _Tool(*(bool(kind.search(name)) for kind in (_RUNS, _WRITES, _SEARCHES, _READS)))


def deeds(call: Call) -> list[tuple[Deed, str]]:
    """Each thing that the call does, with its command, path or query."""
    return list(_deeds(call))


def _deeds(call: Call) -> Iterator[tuple[Deed, str]]:
    tool = _tool(call.name)
    arguments = call.arguments
    if isinstance(arguments, str):
        if tool.runs and not _is_patch(arguments):
            yield from _run(arguments)
        else:
            yield from _patched(arguments)
        return
    paths = list(_values(arguments, _PATHS))
    command = _command(arguments)
    if command and (tool.runs or not paths):
        yield from _run(command)
    elif paths:
        deed = _deed_on_files(tool, arguments, command)
        for path in paths:
            yield deed, path
    if not command:
        for query in _values(arguments, _QUERIES):
            yield Deed.SEARCH, query
        for member in ("input", "patch", "diff", "patchText"):
            if isinstance(text := arguments.get(member), str):
                yield from _patched(text)


def _deed_on_files(tool: _Tool, arguments: dict[str, Any], command: str) -> Deed:
    if command in _VIEW:
        return Deed.READ
    kind = arguments.get("type")  # of an apply_patch_call: create_file, update_file, delete_file
    if tool.writes or (isinstance(kind, str) and _WRITES.search(kind)):
        return Deed.WRITE
    if tool.searches:
        return Deed.SEARCH
    if _CONTENTS & arguments.keys() and not tool.reads:
        return Deed.WRITE
    return Deed.READ


def _run(command: str) -> Iterator[tuple[Deed, str]]:
    yield Deed.RUN, command
    command = command[:TEXT_CHARACTERS_MAX]
    if _is_patch(command):
        yield from _patched(command)
    if ">" in command or "tee " in command:
        for match in _REDIRECTED.finditer(command.split("<<", 1)[0] + _after_heredocs(command)):
            path = match[1].strip("\"'")
            if not path.startswith(("/dev/", "&", "$(")):
                yield Deed.WRITE, path
    if "-i" in command:
        for path in _edited_in_place(command):
            yield Deed.WRITE, path


def _edited_in_place(command: str) -> Iterator[str]:
    """The last file of each `sed -i` and `perl -pi`."""
    for match in islice(_EDITOR.finditer(command), _EDITORS_MAX):
        words: list[str] = []
        place = match.end()
        while (word := _EDITOR_WORD.match(command, place)) and len(words) < _EDITOR_WORDS_MAX:
            words.append(word[1])
            place = word.end()
        options = [word for word in words if word.startswith("-")]
        if any("i" in option for option in options) and len(words) > 2:
            if words[-1][0] not in "-'\"":
                yield words[-1]


def _after_heredocs(command: str) -> str:
    """The first line from each `<<` on: `cat <<EOF > file` names its file behind the mark."""
    return " ".join("\n" + part.split("\n", 1)[0] for part in command.split("<<")[1:])


def _command(arguments: dict[str, Any]) -> str:
    for member in _COMMANDS:
        value = arguments.get(member)
        if isinstance(value, str) and value.strip():
            return value
        if is_array(value) and value:
            words = [word for word in value if isinstance(word, str)]
            if len(words) == len(value):
                return "\n".join(words) if member == "commands" else _from_argv(words)
    return ""


def _from_argv(words: list[str]) -> str:
    """`["bash", "-lc", "make"]` runs `make`."""
    if len(words) == 3 and words[1].startswith("-") and words[1].endswith("c"):
        return words[2]
    return shlex.join(words)


def _is_patch(text: str) -> bool:
    return "*** Begin Patch" in text or "\n+++ " in text


def _patched(text: str) -> Iterator[tuple[Deed, str]]:
    for match in _PATCHED.finditer(text[:TEXT_CHARACTERS_MAX]):
        path = (match[1] or match[2]).strip()
        if path and path != "/dev/null":
            yield Deed.WRITE, path


def _values(arguments: dict[str, Any], members: frozenset[str]) -> Iterator[str]:
    for member, value in arguments.items():
        if member not in members:
            continue
        for one in value if is_array(value) else [value]:
            if is_object(one):
                one = one.get("path") or one.get("file_path")
            if isinstance(one, str) and one.strip():
                yield one
