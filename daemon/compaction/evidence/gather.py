"""From entries to facts: one pass over the body, from its newest entry to its oldest.

So the newest of equal facts is the one that stays, an output is known before its call is met, and
when a section has `FACTS_MAX` facts nothing more is looked at for its sake. The work is bounded:

- of entries older than the `DEEP_ENTRIES` newest only requests and writing calls are looked at,
  which their bytes give away;
- of long texts only the two ends (`outcomes.WINDOW_CHARACTERS`);
- for identifiers and numbers `SCANNED_CHARACTERS_MAX` of all words, and as many of all outputs.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from recapd.daemon.compaction.evidence.deeds import Deed, deeds
from recapd.daemon.compaction.evidence.facts import (
    CARRIED,
    FACT_CHARACTERS_MAX,
    FACTS_MAX,
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
from recapd.protocol.items import REMINDER_END, REMINDER_TAG
from recapd.storage.entry import Entry

SCANNED_CHARACTERS_MAX = 300_000
"""Of words, and again of outputs, that are searched for ids and numbers: 20 ms of patterns each."""

DEEP_ENTRIES = 1_500
"""As many calls as the sections can hold, with their outputs and words, read in about 60 ms."""

FAILING_CHARACTERS_MAX = 200

_REQUEST_IN_LIST_CHARACTERS_MAX = 600
_COMMAND_BLOCK = re.compile(
    r"^```(?:\w*bash\w*|sh|shell|console|zsh)\r?\n(.*?)\n?^```", re.DOTALL | re.MULTILINE
)
_OBSERVED = "<returncode>"  # how agents that run the last code block give its outcome back

_encode = msgspec.json.Encoder().encode

# With a call's arguments before or behind; a pattern is slower than looking for the words.
_WRITING = (b"rite", b"dit", b"atch", b"reate", b"nsert", b"eplace", b"ppend", b"elete")

_RUN, _WRITE, _SEARCH = Deed.RUN, Deed.WRITE, Deed.SEARCH


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts in their written form, newest first in each section."""

    last_request: Fact | None = None  # its text has several lines and is not shortened
    sections: dict[Section, list[Fact]] = field(default_factory=dict[Section, list[Fact]])


def gather(
    body: Sequence[Entry],
    tail: Sequence[Entry] = (),
    dropped: Sequence[Entry] = (),
    redact: Callable[[str], str] = str,
    checkpoint: Callable[[], None] = lambda: None,
) -> Evidence:
    """The facts of `body`; the open calls of `tail` too, which is retained itself.

    What reminders of our own among `dropped` say comes after all that the body says. Secrets are
    taken out by `redact` before anything is cut, since half a secret would not be known for one.
    Never raises for the sake of an item's contents; what `checkpoint` raises ends it.
    """
    gatherer = _Gatherer(redact)
    for entry in reversed(tail):
        gatherer.look_for_open_calls(entry)
    for number, entry in enumerate(reversed(body)):
        checkpoint()
        if number < DEEP_ENTRIES:
            gatherer.look(entry)
        elif _may_ask_or_write(entry.item):
            gatherer.glance(entry)
    gatherer.look_at_stray_outputs()
    for entry in reversed(dropped):
        if entry.reminder is not None:  # nobody else's text is taken for evidence of ours
            gatherer.carry(entry)
    return gatherer.evidence()


class _Gatherer:
    def __init__(self, redact: Callable[[str], str]) -> None:
        self._redact = redact
        self._facts: dict[Section, dict[str, int]] = {section: {} for section in Section}
        self._from_outputs: dict[Section, dict[str, int]] = {section: {} for section in Section}
        self._outputs: dict[str, tuple[int, Output]] = {}
        self._last_request: Fact | None = None
        self._observed: tuple[int, str] | None = None  # an outcome without a call
        self._seen: set[tuple[Section, str]] = set()
        self._words_left = self._outputs_left = SCANNED_CHARACTERS_MAX

    def look(self, entry: Entry) -> None:
        for event in reversed(read(entry.item)):
            if isinstance(event, Output):
                if event.call_id:
                    self._outputs[event.call_id] = (entry.entry_id, event)
                else:
                    self._look_at_output(entry.entry_id, event, _RUN)
            elif isinstance(event, Call):
                self._look_at_call(entry.entry_id, event)
            elif event.role == "user":
                self._look_at_request(entry.entry_id, event.text)
            else:
                self._look_at_words(entry.entry_id, event)

    def glance(self, entry: Entry) -> None:
        """Look for requests and written files only; whether a write succeeded is not known."""
        for event in reversed(read(entry.item)):
            if isinstance(event, Call):
                for deed, path in deeds(event):
                    if deed is _WRITE:
                        self._add(Section.WRITTEN, entry.entry_id, path)
            elif isinstance(event, Words) and event.role == "user":
                self._look_at_request(entry.entry_id, event.text)

    def look_for_open_calls(self, entry: Entry) -> None:
        for event in reversed(read(entry.item)):
            if isinstance(event, Output):
                self._outputs[event.call_id] = (entry.entry_id, event)
            elif isinstance(event, Call) and self._outputs.pop(event.call_id, None) is None:
                self._add_open(entry.entry_id, event)

    def look_at_stray_outputs(self) -> None:
        """Outputs whose calls are not in the body."""
        for entry_id, output in self._outputs.values():
            self._look_at_output(entry_id, output, _RUN)

    def carry(self, reminder: Entry) -> None:
        for event in read(reminder.item):
            if isinstance(event, Words):
                for section, facts in parse(event.text).items():
                    if section in CARRIED:
                        for fact in facts:
                            self._facts[section].setdefault(fact.text, fact.entry_id)

    def evidence(self) -> Evidence:
        """What was found; what people and models wrote comes before what tools gave back."""
        sections: dict[Section, list[Fact]] = {}
        for section, facts in self._facts.items():
            for text, entry_id in self._from_outputs[section].items():
                facts.setdefault(text, entry_id)
            sections[section] = [Fact(entry_id, text) for text, entry_id in facts.items()]
        return Evidence(self._last_request, sections)

    def _look_at_request(self, entry_id: int, text: str) -> None:
        text = _without_reminders(text)
        if not text:
            return
        if text.startswith(_OBSERVED):
            self._observed = (entry_id, text)
            return
        self._look_for_patterns(entry_id, text, self._facts)
        if self._last_request is None:
            self._last_request = Fact(entry_id, self._whole(text))
        elif self._last_request.entry_id == entry_id:  # an earlier part of the same message
            text = f"{self._whole(text)}\n\n{self._last_request.text}"
            self._last_request = Fact(entry_id, text)
        else:
            self._add(Section.REQUESTS, entry_id, text, _REQUEST_IN_LIST_CHARACTERS_MAX)

    def _whole(self, text: str) -> str:
        return neutralise(self._redact(label_media(text)))

    def _look_at_words(self, entry_id: int, words: Words) -> None:
        self._look_for_patterns(entry_id, words.text, self._facts)
        if words.role == "assistant" and "```" in words.text:
            for command in _COMMAND_BLOCK.findall(words.text):
                observed_in, output = self._observed or (entry_id, "")
                self._observed = None
                call = Call("", "shell", {"command": command})
                self._look_at_deeds(entry_id, call, (observed_in, Output("", output)))

    def _look_at_call(self, entry_id: int, call: Call) -> None:
        answered = self._outputs.pop(call.call_id, None)
        if answered is None:
            self._add_open(entry_id, call)
        self._look_at_deeds(entry_id, call, answered)

    def _look_at_deeds(
        self, entry_id: int, call: Call, answered: tuple[int, Output] | None
    ) -> None:
        done = list(deeds(call))
        runs = any(deed is _RUN for deed, _ in done)
        output_id, output = answered or (entry_id, None)
        status = ""
        if output is not None:
            status = output.status
            if runs and status in ("", "failed"):
                status = exit_status(output.text) or status
        for deed, text in done:
            if deed is _RUN:
                if status:
                    said = status if status in ("failed", "timeout") else f"exit {status}"
                    self._add(Section.STATUS, entry_id, text, prefix=f"{said}: ")
                else:
                    self._add(Section.COMMANDS, entry_id, text)
            elif deed is _WRITE:
                failed = " (failed)" if status and status != "0" and not runs else ""
                self._add(Section.WRITTEN, entry_id, text, suffix=failed)
            else:
                self._add(Section.SEARCHES if deed is _SEARCH else Section.READ, entry_id, text)
        if output is not None:
            kind = _RUN if runs or status == "failed" or not done else _WRITE
            self._look_at_output(output_id, output, kind, status)

    def _look_at_output(self, entry_id: int, output: Output, kind: Deed, status: str = "") -> None:
        text = output.text
        if not text:
            return
        if kind is _RUN:
            failed = bool(status or output.status) and (status or output.status) != "0"
            if self._has_room(Section.FAILING):
                for line in failing_lines(text, failed):
                    self._add(Section.FAILING, entry_id, line, FAILING_CHARACTERS_MAX)
            self._look_for_patterns(entry_id, text, self._from_outputs)
        elif "://" in text:
            self._look_for_urls(entry_id, self._redact(ends(text)), self._from_outputs)

    def _look_for_patterns(
        self, entry_id: int, text: str, into: dict[Section, dict[str, int]]
    ) -> None:
        text = ends(text)
        if into is self._from_outputs:
            left = self._outputs_left = self._outputs_left - len(text)
        else:
            left = self._words_left = self._words_left - len(text)
        if left < 0:
            if "://" in text:
                self._look_for_urls(entry_id, self._redact(text), into)
            return
        text = label_media(self._redact(text))
        self._look_for_urls(entry_id, text, into)
        ids, numbers = into[Section.IDENTIFIERS], into[Section.NUMBERS]
        for kind, found in identifiers_and_numbers(text):
            facts = ids if kind == "identifier" else numbers
            if len(facts) < FACTS_MAX:
                facts.setdefault(one_line(found), entry_id)

    def _look_for_urls(self, entry_id: int, text: str, into: dict[Section, dict[str, int]]) -> None:
        if len(into[Section.URLS]) < FACTS_MAX:
            for url in urls(text):
                into[Section.URLS].setdefault(one_line(url), entry_id)

    def _has_room(self, section: Section) -> bool:
        return len(self._facts[section]) < FACTS_MAX

    def _add(
        self,
        section: Section,
        entry_id: int,
        text: str,
        characters_max: int = FACT_CHARACTERS_MAX,
        *,
        prefix: str = "",
        suffix: str = "",
    ) -> None:
        facts = self._facts[section]
        key = (section, f"{prefix}{text}{suffix}")
        if len(facts) >= FACTS_MAX or key in self._seen:
            return
        self._seen.add(key)
        line = one_line(self._redact(text), characters_max)
        if line and not (suffix and line in facts):
            facts.setdefault(f"{prefix}{line}{suffix}", entry_id)

    def _add_open(self, entry_id: int, call: Call) -> None:
        arguments = call.arguments
        if not isinstance(arguments, str):
            arguments = _encode(arguments).decode()
        call_id = one_line(call.call_id, 100)
        self._add(
            Section.OPEN, entry_id, arguments, prefix=f"{one_line(call.name, 100)} {call_id}: "
        )


def _may_ask_or_write(item: bytes) -> bool:
    if b'"user"' in item:
        return b"tool_result" not in item
    if b'"arguments"' in item or b'"input"' in item or b'"operation"' in item:
        return any(word in item for word in _WRITING)
    return False


def _without_reminders(text: str) -> str:
    """What a user message says beside reminders that it begins with."""
    while text.lstrip().startswith(REMINDER_TAG):
        _, end, text = text.partition(REMINDER_END)
        if not end:
            return ""
    return text if text.strip() else ""
