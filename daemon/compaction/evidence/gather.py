"""From entries to facts: one pass over the body, from its newest entry to its oldest.

So the newest of equal facts is the one that stays, and an output is known before its call is met.
How much room there is for facts is known beforehand. A section that has enough of them is full, an
entry that could only say something for full sections is not decoded, and when all are full the pass
ends. What is never full is bounded otherwise:

- when as many calls were read as the lists could hold (`CALL_CHARACTERS`), of older ones only those
  are read whose bytes tell of a write;
- of long texts only the two ends are looked at (`outcomes.ends`);
- for failures, ids and numbers the newest texts are (`SCANNED_CHARACTERS`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from recapd.daemon.compaction.evidence.deeds import Deed, deeds
from recapd.daemon.compaction.evidence.facts import (
    CARRIED,
    FACT_CHARACTERS_MAX,
    Fact,
    Section,
    one_line,
    parse,
)
from recapd.daemon.compaction.evidence.outcomes import ends, exit_status, failing_lines
from recapd.daemon.compaction.evidence.patterns import identifiers_and_numbers, urls
from recapd.daemon.compaction.evidence.read import Call, Output, Words, read
from recapd.daemon.compaction.media import label_media
from recapd.daemon.compaction.reminder import neutralise
from recapd.protocol.items import REMINDER_END, REMINDER_TAG, ItemFacts, Role
from recapd.storage.entry import Entry

CALL_CHARACTERS = 40
"""For each so many characters of room one call is read, with its output, the newest first."""

SCANNED_CHARACTERS = 1
"""For each character of room so many of messages are searched, and as many of outputs."""

MESSAGES_MAX = 500
"""Without a call among their parts: after so many in a row no call is looked for in messages."""

_ENTRIES_AT_ONCE = 32  # between two looks at what is still wanted
_FAILING_CHARACTERS_MAX = 200
_REQUEST_CHARACTERS_MAX = 600
_NAME_CHARACTERS_MAX = 100
_UNCUT_CHARACTERS_MAX = 20_000  # of what is cut to a line: a key that begins in it must be known
_ID_CHARACTERS = 8  # of `[1234] ` and the line break
_COMMAND_BLOCK = re.compile(
    r"^```(?:\w*bash\w*|sh|shell|console|zsh)\r?\n(.*?)\n?^```", re.DOTALL | re.MULTILINE
)
_OBSERVED = "<returncode>"  # how agents that run the last code block give its outcome back
_OBSERVED_BYTES = _OBSERVED.encode()
_OBSERVED_WITHIN = 200  # bytes of an item, if at all
# With a call's arguments before or behind; a pattern is slower than looking for the words.
_WRITING = (b"rite", b"dit", b"atch", b"reate", b"nsert", b"eplace", b"ppend", b"elete", b" > ")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts in their written form, newest first in each section."""

    last_request: Fact | None = None  # its text has several lines and is not shortened
    sections: dict[Section, list[Fact]] = field(default_factory=dict[Section, list[Fact]])

    def beyond(self, summary: str) -> "Evidence":
        """What `summary` does not say word for word, lines of it being indented or not."""
        summary = neutralise(summary)
        asked = self.last_request
        if asked is not None:
            text = asked.text.strip()
            if text in summary or text.replace("\n", "\n  ") in summary:
                asked = None
        return Evidence(
            asked,
            {
                section: [fact for fact in facts if fact.text not in summary]
                for section, facts in self.sections.items()
            },
        )


def gather(
    body: Sequence[Entry],
    facts: Sequence[ItemFacts],
    tail: Sequence[Entry] = (),
    dropped: Sequence[Entry] = (),
    *,
    characters: int,
    redact: Callable[[str], str] = str,
    checkpoint: Callable[[], None] = lambda: None,
) -> Evidence:
    """The facts of `body`, whose items are what `facts` say, and the open calls of `tail`.

    What reminders of our own say, among `dropped` and at the head of `body`, where they are when
    they were folded into it, comes after all that the body says. `characters`
    are those of all lists together, of which each may have twice its `Section.percent`. Secrets are
    taken out by `redact` before anything is cut, since half a secret would not be known for one.
    Never raises for the sake of an item's contents; what `checkpoint` raises ends it.
    """
    gatherer = _Gatherer(characters, redact)
    for entry in reversed(tail):
        gatherer.look_for_open_calls(entry)
    for stop in range(len(body), 0, -_ENTRIES_AT_ONCE):
        checkpoint()
        if not gatherer.wants_more():
            break
        for position in range(stop - 1, max(stop - _ENTRIES_AT_ONCE, 0) - 1, -1):
            gatherer.look(body[position], facts[position])
    gatherer.look_at_stray_outputs()
    folded = takewhile(lambda entry: entry.reminder is not None, body)
    for entry in reversed([*dropped, *folded]):
        if entry.reminder is not None:  # nobody else's text is taken for evidence of ours
            gatherer.carry(entry)
    return gatherer.evidence()


class _List:
    """The facts of a section, as many as it has room for."""

    __slots__ = ("facts", "left", "seen")

    def __init__(self, characters: int) -> None:
        self.facts: dict[str, int] = {}  # the newest entry of each
        self.left = characters
        self.seen: set[str] = set()

    def is_new(self, text: str) -> bool:
        """Whether there is room for a fact that was not met before in this spelling."""
        if self.left <= 0 or text in self.seen:
            return False
        self.seen.add(text)
        return True

    def add(self, entry_id: int, text: str) -> None:
        if self.left > 0 and text and text not in self.facts:
            self.facts[text] = entry_id
            self.left -= len(text) + _ID_CHARACTERS


class _Gatherer:
    def __init__(self, characters: int, redact: Callable[[str], str]) -> None:
        self._redact = redact
        self._lists = {
            section: _List(2 * characters * section.percent // 100) for section in Section
        }
        self._open, self._written = self._lists[Section.OPEN], self._lists[Section.WRITTEN]
        self._commands, self._read = self._lists[Section.COMMANDS], self._lists[Section.READ]
        self._status, self._failing = self._lists[Section.STATUS], self._lists[Section.FAILING]
        self._requests, self._urls = self._lists[Section.REQUESTS], self._lists[Section.URLS]
        self._ids, self._numbers = self._lists[Section.IDENTIFIERS], self._lists[Section.NUMBERS]
        self._outputs: dict[str, tuple[int, Output]] = {}
        self._last_request: Fact | None = None
        self._observed: tuple[int, str] | None = None  # an outcome without a call
        self._messages_left = self._outputs_left = characters * SCANNED_CHARACTERS
        self._calls_left, self._blocks_left = characters // CALL_CHARACTERS, MESSAGES_MAX
        self._seen_urls: set[str] = set()
        self._wants_calls = self._wants_requests = self._wants_messages = True
        self._wants_writes = False  # and nothing else of calls

    def wants_more(self) -> bool:
        """Whether an older entry could still add anything."""
        scanned = self._urls.left > 0 or self._ids.left > 0 or self._numbers.left > 0
        self._wants_messages = scanned and self._messages_left > 0
        self._wants_requests = self._last_request is None or self._requests.left > 0
        others = self._status.left > 0 or self._commands.left > 0 or self._read.left > 0
        self._wants_calls = others and self._calls_left > 0
        self._wants_writes = self._written.left > 0 and not self._wants_calls
        return (
            self._wants_messages or self._wants_requests or self._wants_calls or self._wants_writes
        )

    def look(self, entry: Entry, facts: ItemFacts) -> None:
        if not self._may_say_something(entry.item, facts):
            return
        for event in reversed(read(entry.item)):
            if isinstance(event, Output):
                if not self._wants_calls:
                    pass
                elif event.call_id:
                    self._outputs[event.call_id] = (entry.entry_id, event)
                else:
                    self._look_at_outcome(entry.entry_id, event.text, event.status)
            elif isinstance(event, Call):
                self._look_at_call(entry.entry_id, event)
            elif event.role == "user":
                self._look_at_request(entry.entry_id, event.text)
            else:
                self._look_at_words(entry.entry_id, event)

    def look_for_open_calls(self, entry: Entry) -> None:
        for event in reversed(read(entry.item)):
            if isinstance(event, Output):
                self._outputs[event.call_id] = (entry.entry_id, event)
            elif isinstance(event, Call) and self._outputs.pop(event.call_id, None) is None:
                self._add_open(entry.entry_id, event)

    def look_at_stray_outputs(self) -> None:
        """Outputs whose calls are not in the body."""
        for entry_id, output in self._outputs.values():
            self._look_at_outcome(entry_id, output.text, output.status)

    def carry(self, reminder: Entry) -> None:
        for event in read(reminder.item):
            if isinstance(event, Words):
                for section, facts in parse(event.text).items():
                    if section in CARRIED:
                        for fact in facts:
                            self._lists[section].add(fact.entry_id, fact.text)

    def evidence(self) -> Evidence:
        return Evidence(
            self._last_request,
            {
                section: [Fact(entry_id, text) for text, entry_id in found.facts.items()]
                for section, found in self._lists.items()
            },
        )

    def _may_say_something(self, item: bytes, facts: ItemFacts) -> bool:
        if facts.calls or facts.type.endswith("_call"):
            return self._wants_calls or (self._wants_writes and _may_write(item))
        if facts.outputs or facts.type.endswith("_output"):
            return self._wants_calls
        if facts.type != "message":
            return False
        if self._wants_messages or self._observed is not None:
            return True
        if self._wants_requests and facts.role is not Role.OTHER:
            return True
        return self._blocks_left > 0 and self._has_calls_or_outputs(item, facts)

    def _has_calls_or_outputs(self, item: bytes, facts: ItemFacts) -> bool:
        """Whether a message has them among its parts."""
        if facts.role is Role.OTHER:
            found = b"tool_use" in item or b"toolCall" in item
        else:
            found = item.find(_OBSERVED_BYTES, 0, _OBSERVED_WITHIN) > 0 or b"tool_result" in item
        self._blocks_left = MESSAGES_MAX if found else self._blocks_left - 1
        if self._wants_calls or not found:
            return found
        return self._wants_writes and facts.role is Role.OTHER and _may_write(item)

    def _look_at_request(self, entry_id: int, text: str) -> None:
        text = _without_reminders(text)
        if not text:
            return
        if text.startswith(_OBSERVED):
            self._observed = (entry_id, text)
            return
        self._look_at_text(entry_id, text)
        if self._last_request is None:
            self._last_request = Fact(entry_id, self._whole(text))
        elif self._last_request.entry_id == entry_id:  # an earlier part of the same message
            text = f"{self._whole(text)}\n\n{self._last_request.text}"
            self._last_request = Fact(entry_id, text)
        else:
            self._add(self._requests, entry_id, text, _REQUEST_CHARACTERS_MAX)

    def _whole(self, text: str) -> str:
        return neutralise(self._redact(label_media(text)))

    def _look_at_words(self, entry_id: int, words: Words) -> None:
        if self._wants_messages:
            self._look_at_text(entry_id, words.text)
        if self._observed is not None and words.role == "assistant":
            (observed_in, output), self._observed = self._observed, None
            for command in _COMMAND_BLOCK.findall(words.text):
                call = Call("", "shell", {"command": command})
                self._look_at_deeds(entry_id, call, (observed_in, Output("", output)))

    def _look_at_call(self, entry_id: int, call: Call) -> None:
        self._calls_left -= 1
        answered = self._outputs.pop(call.call_id, None)
        if self._wants_calls:
            if answered is None:
                self._add_open(entry_id, call)
            self._look_at_deeds(entry_id, call, answered)
        elif self._wants_writes:  # whether it succeeded is not known
            for deed, path in deeds(call):
                if deed is Deed.WRITE:
                    self._add(self._written, entry_id, path)

    def _look_at_deeds(
        self, entry_id: int, call: Call, answered: tuple[int, Output] | None
    ) -> None:
        done = deeds(call)
        runs = any(deed is Deed.RUN for deed, _ in done)
        output_id, output = answered or (entry_id, Output("", ""))
        status = output.status
        if runs and status in ("", "failed"):
            status = exit_status(output.text) or status
        for deed, text in done:
            if deed is Deed.RUN:
                said = f"exit {status}" if status.lstrip("-").isdecimal() else status
                if said:
                    self._add(self._status, entry_id, text, prefix=f"{said}: ")
                else:
                    self._add(self._commands, entry_id, text)
            elif deed is Deed.WRITE:
                if status in ("", "0") or runs:
                    self._add(self._written, entry_id, text)
                elif text not in self._written.seen:  # by a later call that wrote it
                    self._add(self._written, entry_id, text, suffix=" (failed)")
            elif deed is Deed.READ:
                self._add(self._read, entry_id, text)
        if runs or status == "failed" or not done:
            self._look_at_outcome(output_id, output.text, status)
        elif output.text:
            self._look_for_patterns(output_id, ends(output.text))

    def _look_at_outcome(self, entry_id: int, text: str, status: str) -> None:
        """The text that a command or an unknown tool gave back."""
        text = ends(text)
        searched = self._outputs_left > 0
        if searched and self._failing.left > 0:
            for line in failing_lines(text, failed=status not in ("", "0")):
                self._add(self._failing, entry_id, line, _FAILING_CHARACTERS_MAX)
        self._outputs_left -= len(text)
        self._look_for_patterns(entry_id, text, ids=searched)

    def _look_at_text(self, entry_id: int, text: str) -> None:
        """What a person or a model wrote."""
        text = ends(text)
        searched = self._messages_left > 0
        self._messages_left -= len(text)
        self._look_for_patterns(entry_id, text, ids=searched, numbers=searched)

    def _look_for_patterns(
        self, entry_id: int, text: str, *, ids: bool = False, numbers: bool = False
    ) -> None:
        found = self._patterns(text, ids, numbers)
        if found and (redacted := self._redact(text)) is not text:
            self._seen_urls.clear()
            found = self._patterns(redacted, ids, numbers)
        for facts, fact in found:
            facts.add(entry_id, one_line(fact))

    def _patterns(self, text: str, ids: bool, numbers: bool) -> list[tuple[_List, str]]:
        found: list[tuple[_List, str]] = []
        if self._urls.left > 0 and "://" in text:
            found += [(self._urls, url) for url in urls(text, self._seen_urls)]
        numbers = numbers and self._numbers.left > 0
        if numbers or (ids and self._ids.left > 0):
            for kind, fact in identifiers_and_numbers(label_media(text), numbers=numbers):
                found.append((self._ids if kind == "identifier" else self._numbers, fact))
        return found

    def _add(
        self,
        facts: _List,
        entry_id: int,
        text: str,
        characters_max: int = FACT_CHARACTERS_MAX,
        *,
        prefix: str = "",
        suffix: str = "",
    ) -> None:
        if facts.is_new(f"{prefix}{text}{suffix}"):
            line = one_line(self._redact(text[:_UNCUT_CHARACTERS_MAX]), characters_max)
            facts.add(entry_id, f"{prefix}{line}{suffix}" if line else "")

    def _add_open(self, entry_id: int, call: Call) -> None:
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = _encode(arguments).decode()
        call_id = one_line(self._redact(call.call_id), _NAME_CHARACTERS_MAX)
        name = one_line(self._redact(call.name), _NAME_CHARACTERS_MAX)
        self._add(self._open, entry_id, arguments, prefix=f"{name} {call_id}: ")


def _may_write(item: bytes) -> bool:
    return any(word in item for word in _WRITING)


def _without_reminders(text: str) -> str:
    """What a user message says beside reminders that it begins with."""
    while text.lstrip().startswith(REMINDER_TAG):
        _, end, text = text.partition(REMINDER_END)
        if not end:
            return ""
    return text if text.strip() else ""
