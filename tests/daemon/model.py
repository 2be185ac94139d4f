"""What a daemon must have, by the words of PROTOCOL.md §2 to §5: plain lists, no storage, no tasks.

A history is a list of lines, the id of an entry and the bytes of its item. The daemon's own items
cannot be foretold; they are told to the model once and must then stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

Line = tuple[int, bytes]

REMINDERS_MAX = 10


@dataclass(frozen=True)
class Told:
    """An event as far as it can be foretold."""

    seq: int
    method: str
    revision: int
    generation: int
    operation_id: str | None


@dataclass
class Kept:
    """A session; `made` has the ids of the reminders among its entries, of all its revisions."""

    history: list[Line] = field(default_factory=list[Line])
    archives: dict[int, list[Line]] = field(default_factory=dict[int, list[Line]])
    made: set[int] = field(default_factory=set[int])
    revision: int = 0
    generation: int = 0
    next_entry_id: int = 1

    def add(self, items: Sequence[bytes]) -> list[Line]:
        lines = list(enumerate(items, start=self.next_entry_id))
        self.history += lines
        self.next_entry_id += len(items)
        self.revision += 1
        return lines

    def replace(self, history: list[Line]) -> None:
        self.archives[self.revision] = self.history
        self.history = history
        self.revision += 1
        self.generation += 1

    def of(self, revision: int) -> list[Line]:
        return self.history if revision == self.revision else self.archives[revision]

    @property
    def compactable(self) -> bool:
        """Whether there is more than instructions and reminders (PROTOCOL.md §5.5)."""
        return bool(self._content)

    @property
    def long(self) -> bool:
        """Whether a model may sum it up: what it says must be shorter than what it read."""
        return any(len(item) > 150 for item in self._content)

    @property
    def _content(self) -> list[bytes]:
        return [i for id, i in self.history if not is_instruction(i) and id not in self.made]


class Model:
    """All sessions, and every event ever told, by session id: a deletion ends no numbering."""

    def __init__(self) -> None:
        self.sessions: dict[str, Kept] = {}
        self.told: dict[str, list[Told]] = {}
        self.deleted_at: dict[str, int] = {}  # seq of the last `session.deleted`

    def seq(self, session_id: str) -> int:
        return len(self.told.get(session_id, ()))

    def log(self, session_id: str) -> list[Told]:
        """What can still be asked for; a deletion takes the events before it."""
        return self.told[session_id][max(0, self.deleted_at.get(session_id, 0) - 1) :]

    def _tell(self, session_id: str, method: str, operation_id: str | None) -> None:
        kept = self.sessions[session_id]
        told = self.told.setdefault(session_id, [])
        told.append(Told(len(told) + 1, method, kept.revision, kept.generation, operation_id))

    # Each change, once it was acknowledged.

    def create(self, session_id: str, items: Sequence[bytes], operation_id: str) -> None:
        kept = self.sessions[session_id] = Kept()
        self._tell(session_id, "session.created", operation_id)
        if items:
            kept.add(items)
            self._tell(session_id, "history.appended", operation_id)

    def append(self, session_id: str, items: Sequence[bytes], operation_id: str) -> list[int]:
        lines = self.sessions[session_id].add(items)
        self._tell(session_id, "history.appended", operation_id)
        return [id for id, _ in lines]

    def begin(self, session_id: str, operation_id: str) -> list[Line]:
        """A compaction; what it saw is for `compact`."""
        self._tell(session_id, "compaction.started", operation_id)
        return list(self.sessions[session_id].history)

    def compact(
        self, session_id: str, saw: list[Line], reminder: bytes, operation_id: str
    ) -> list[Line]:
        """Instructions, ten reminders, the new one, and what was appended meanwhile."""
        kept = self.sessions[session_id]
        carried = kept.history[len(saw) :]
        instructions = [line for line in saw if is_instruction(line[1])]
        reminders = [line for line in saw if line[0] in kept.made][-REMINDERS_MAX:]
        new = (kept.next_entry_id, reminder)
        kept.next_entry_id += 1
        kept.made.add(new[0])
        kept.replace([*instructions, *reminders, new, *carried])
        self._tell(session_id, "history.replaced", operation_id)
        self.end(session_id, operation_id)
        return kept.history

    def end(self, session_id: str, operation_id: str) -> None:
        """A compaction, whether it did anything or not."""
        self._tell(session_id, "compaction.finished", operation_id)

    def restore(self, session_id: str, revision: int, operation_id: str) -> bool:
        """Whether it changed anything; so the next one."""
        kept = self.sessions[session_id]
        return self._go_back(session_id, kept.of(revision), operation_id)

    def rewind(self, session_id: str, after_entry_id: int, operation_id: str) -> bool:
        kept = self.sessions[session_id]
        if kept.history[-1:] and kept.history[-1][0] == after_entry_id:
            return False
        return self._go_back(session_id, up_to(kept.history, after_entry_id), operation_id)

    def _go_back(self, session_id: str, history: list[Line], operation_id: str) -> bool:
        kept = self.sessions[session_id]
        if history is kept.history or (not history and not kept.history):
            return False
        kept.replace(list(history))
        self._tell(session_id, "history.replaced", operation_id)
        return True

    def fork(
        self, source: str, revision: int, after_entry_id: int | None, new: str, operation_id: str
    ) -> None:
        kept = self.sessions[source]
        history = up_to(kept.of(revision), after_entry_id)
        self.sessions[new] = Kept(history, {}, set(kept.made), next_entry_id=kept.next_entry_id)
        self._tell(new, "session.created", operation_id)

    def delete(self, session_id: str, operation_id: str) -> bool:
        if session_id not in self.sessions:
            return False
        self._tell(session_id, "session.deleted", operation_id)
        self.deleted_at[session_id] = self.seq(session_id)
        del self.sessions[session_id]
        return True


def is_instruction(item: bytes) -> bool:
    return b'"system"' in item


def up_to(history: list[Line], entry_id: int | None) -> list[Line]:
    """The entries to that one, by their order in the history; 0: none, None: all."""
    if entry_id is None:
        return list(history)
    ids = [id for id, _ in history]
    return history[: ids.index(entry_id) + 1 if entry_id else 0]
