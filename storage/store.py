"""What the daemon may ask of what is durable, and what each call promises.

A Store keeps sessions: for each its present history, its archived revisions, its events and the
operations on it. Changes are *handed over* by an ordinary call and take effect in the order of
those calls; the `Pending` that comes back is settled when the change is durable (or refused, or
failed). A change is atomic. Its events are written with it and are passed to the listener once it
is durable, before its Pending is settled.

Nothing here says how: `sqlite.py` is the Store over SQLite and archive files, `memory.py` the same
in plain dictionaries, which tests use as the executable specification.
"""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from recapd.storage.errors import Conflict
from recapd.storage.pending import Pending

Durability = Literal["durable", "transient"]
State = Literal["active", "archived"]
Kind = Literal["compaction", "restore", "rewind"]
Status = Literal["running", "completed", "failed", "cancelled", "skipped"]
Order = Literal["asc", "desc"]
SortKey = Literal["updated_at", "created_at", "session_id"]
FaultKind = Literal[
    "entries_missing",
    "entries_damaged",
    "events_missing",
    "revisions_missing",
    "archive_missing",
    "archive_corrupt",
    "database_damaged",
]


class Tokens(msgspec.Struct, frozen=True):
    """A size in tokens: `counted` with the tokeniser's table, and `estimated` from bytes as items
    are appended.
    """

    counted: int = 0
    estimated: int = 0


class Parent(msgspec.Struct, frozen=True):
    """Where a fork comes from: a session, which may be gone by now, and one of its revisions."""

    session_id: str
    revision: int


class AutoCompact(msgspec.Struct, frozen=True):
    """When and how a session is to be compacted unasked. The store keeps it, and does nothing."""

    at_tokens: int
    keep_recent_tokens: int = 0
    instructions: str | None = None
    summarizer: str | None = None


class Session(msgspec.Struct, frozen=True):
    """A session as it is at one revision. Times are in milliseconds since the epoch."""

    session_id: str
    title: str | None
    cwd: str | None
    labels: dict[str, str]
    created_at_ms: int
    updated_at_ms: int
    durability: Durability
    state: State
    revision: int
    generation: int
    entries: int
    tokens: Tokens
    archived_revisions: tuple[int, ...]  # newest first
    next_entry_id: int
    seq: int  # of the session's latest event
    running: str | None  # the operation id of the compaction that has not ended
    parent: Parent | None = None
    auto_compact: AutoCompact | None = None


class Revision(msgspec.Struct, frozen=True):
    """An archived revision: a history that was replaced, as its file and row say."""

    revision: int
    generation: int
    kind: Kind
    operation_id: str
    archived_at_ms: int
    entries: int
    tokens: Tokens
    bytes: int  # of the archive file
    sha256: str  # of the archive file, in hexadecimal


class Operation(msgspec.Struct, frozen=True):
    """How a change ended that was made under an operation id.

    `outcome` is JSON: the result, or the error.
    """

    operation_id: str
    method: str
    session_id: str
    status: Status
    started_at_ms: int
    ended_at_ms: int | None
    outcome: bytes | None


class Event(msgspec.Struct, frozen=True):
    """Something that happened to a session.

    `body` is a JSON object that repeats the session id and `seq`. `ordinal` rises over all sessions
    of a store; `seq` rises by one with each event of a session.
    """

    ordinal: int
    session_id: str
    seq: int
    method: str
    body: bytes


class Expect(msgspec.Struct, frozen=True):
    """What the caller believes the session to be at; None: anything."""

    revision: int | None = None
    generation: int | None = None

    def check(self, revision: int, generation: int) -> None:
        """Raises Conflict unless these, the present ones, are expected."""
        if self.revision not in (None, revision) or self.generation not in (None, generation):
            raise Conflict(revision, generation)


NOTHING_EXPECTED = Expect()


class Receipt(msgspec.Struct, frozen=True):
    """Makes a change happen at most once: its outcome is recorded with it, under `operation_id`.

    `digest` tells parameters apart. The change's `render` makes the recorded outcome.
    """

    operation_id: str
    method: str
    digest: bytes


class Replayed(msgspec.Struct, frozen=True):
    """Instead of a result: the change had been made before, with this outcome (JSON)."""

    operation: Operation


class NewSession(msgspec.Struct, frozen=True):
    """A session to create."""

    session_id: str
    title: str | None = None
    cwd: str | None = None
    labels: dict[str, str] = {}
    durability: Durability = "durable"
    parent: Parent | None = None
    auto_compact: AutoCompact | None = None


class NewItem(msgspec.Struct, frozen=True):
    """An item to append: its bytes in one line, its estimated size in tokens, and the ids of the
    calls that it makes and answers.
    """

    item: bytes
    tokens: int
    calls: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


class Appended(msgspec.Struct, frozen=True):
    """What was appended. `unmatched`: calls that an item answers and the history does not make."""

    session: Session
    first_entry_id: int
    last_entry_id: int
    unmatched: tuple[tuple[int, str], ...]  # entry id, call id


class SessionChanges(msgspec.Struct, frozen=True):
    """New values of a session's own fields; UNSET keeps what is there, None clears."""

    title: str | msgspec.UnsetType | None = msgspec.UNSET
    cwd: str | msgspec.UnsetType | None = msgspec.UNSET
    labels: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    state: State | msgspec.UnsetType = msgspec.UNSET
    auto_compact: AutoCompact | msgspec.UnsetType | None = msgspec.UNSET


class History(msgspec.Struct, frozen=True):
    """A whole history to put in place; `next_entry_id` is over every id that was ever given out."""

    lines: Sequence[bytes]  # its entries (`entry.py`)
    calls: Sequence[str]  # ids of the calls that it makes
    next_entry_id: int
    tokens: Tokens


class Replacement(msgspec.Struct, frozen=True):
    """A new history in place of the present one, and the archive that has the present one."""

    operation_id: str
    archive: Revision
    history: History
    event: dict[str, object]  # further members of `history.replaced`
    finished: dict[str, object] = {}  # and of `compaction.finished`


class Page(msgspec.Struct, frozen=True):
    """A piece of one history.

    `entries` are lines (`entry.py`); `next_index` goes on behind the last of them.
    """

    session: Session
    revision: int
    generation: int
    total: int  # entries of the history that is paged through
    entries: list[bytes]
    next_index: int | None


class Query(msgspec.Struct, frozen=True):
    """Which sessions to list. `after` is the (sort value, session id) of the last one seen."""

    state: State | None = None
    cwd: str | None = None
    labels: dict[str, str] = {}
    title_contains: str | None = None
    updated_after_ms: int | None = None  # exclusive
    updated_before_ms: int | None = None  # exclusive
    sort: SortKey = "updated_at"
    order: Order = "desc"
    limit: int = 100
    after: tuple[int | str, str] | None = None
    only: tuple[str, ...] | None = None  # these session ids; None: all


class AccessToken(msgspec.Struct, frozen=True):
    """What a token allows, and its SHA-256. `sessions` None: all. `parent`: the token that made it.

    Times are in milliseconds since the epoch; `expires_at_ms` None: never.
    """

    token_id: str
    digest: bytes
    label: str
    scopes: tuple[str, ...]
    sessions: tuple[str, ...] | None
    parent: str | None
    created_at_ms: int
    expires_at_ms: int | None


class Fault(msgspec.Struct, frozen=True):
    """Something that is not as it was written. `revision`: in which history, where it is one."""

    session_id: str
    revision: int | None
    kind: FaultKind


class Verified(msgspec.Struct, frozen=True):
    """What was verified of a session: how many histories, and how many bytes were read for it."""

    histories: int
    bytes: int
    faults: list[Fault]


class StoreHealth(msgspec.Struct, frozen=True):
    """How the store is doing. `moved`: it is not where it was opened. Sizes in bytes."""

    writable: bool
    damaged: bool
    moved: bool
    database_bytes: int
    log_bytes: int
    disk_free_bytes: int
    waiting_changes: int


Listener = Callable[[Sequence[Event]], None]


class Store(Protocol):
    """See the module. Any call may raise StorageError, and UnknownSession if it names a session."""

    @property
    def store_id(self) -> str:
        """Made when the store was made; the same for ever."""
        ...

    def listen(self, listener: Listener) -> None:
        """Pass every durable event to `listener`, in order, on the event loop's thread.

        There is one listener.
        """
        ...

    # Changes.

    def create(
        self,
        new: NewSession,
        items: Sequence[NewItem] = (),
        *,
        history: History | None = None,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes] | None = None,
    ) -> Pending[Session | Replayed]:
        """Make a session, with its first items in the same change (revision 1 then, otherwise 0).

        With `history` it is born with those entries: at revision 0, and `session.created` is all
        that is told of them.

        Raises SessionExists, OperationReused.
        """
        ...

    def append(
        self,
        session_id: str,
        items: Sequence[NewItem],
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[Appended], bytes] | None = None,
    ) -> Pending[Appended | Replayed]:
        """Add at least one item to the end of the history; the revision rises by one.

        Raises Conflict, SessionClosed, OperationReused.
        """
        ...

    def update(
        self,
        session_id: str,
        changes: SessionChanges,
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes] | None = None,
    ) -> Pending[Session | Replayed]:
        """Change a session's own fields; neither revision nor generation rise.

        Raises Conflict, OperationReused.
        """
        ...

    def begin(
        self, session_id: str, receipt: Receipt, *, expect: Expect = NOTHING_EXPECTED
    ) -> Pending[Session | Replayed]:
        """Begin a compaction: its operation is `running` until `replace` or `end`.

        The session as it begins.

        Raises Conflict, SessionClosed, CompactionRunning, OperationReused.
        """
        ...

    def end(
        self, operation_id: str, status: Status, outcome: bytes, event: dict[str, object]
    ) -> Pending[Operation]:
        """End a running compaction without a replacement.

        `outcome` is its error as JSON, `event` goes out. An operation that has ended already stays
        as it is and is returned. Raises OperationUnknown.
        """
        ...

    def replace(
        self,
        session_id: str,
        change: Replacement,
        *,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes],
    ) -> Pending[Session | Replayed]:
        """Put a new history in place of the present one.

        A compaction, which `begin` recorded, ends with it; what else replaces has a receipt. The
        archive of the present history is durable; StorageError if it is not there any more.
        Revision and generation rise by one. Raises OperationReused; Superseded when the session is
        not at the archive's revision.
        """
        ...

    def keep(
        self, session_id: str, receipt: Receipt, *, render: Callable[[Session], bytes]
    ) -> Pending[Session | Replayed]:
        """Record that an operation found nothing to change: a repetition will not change anything
        either, whatever has happened by then.

        Raises OperationReused.
        """
        ...

    def delete(
        self,
        session_id: str,
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[bool], bytes] | None = None,
        ended: bytes = b"{}",
    ) -> Pending[bool | Replayed]:
        """Remove a session with entries, events and archives; False when there was none.

        A compaction that runs is cancelled with `ended` (JSON) as its outcome. The deletion's own
        event stays, so that a session of the same id later goes on with the next `seq`.

        Raises Conflict, OperationReused.
        """
        ...

    def add_token(self, token: AccessToken) -> Pending[None]:
        """Keep a token; those that have expired are removed."""
        ...

    def remove_tokens(self, token_ids: Sequence[str]) -> Pending[None]:
        """Remove tokens; those that are not there are no error."""
        ...

    # Archives.

    async def archive(self, session: Session, kind: Kind, operation_id: str) -> Revision:
        """Write the present history to its archive, durable and read back on return.

        Nothing refers to it yet. The caller sees to it that nothing changes the session until
        `replace`. Raises Superseded when it is no longer at `session.revision`.
        """
        ...

    async def discard_archive(self, session_id: str, revision: int) -> None:
        """Remove an archive after a replacement that failed; one that a revision names stays.

        What cannot be removed now is removed when the store is opened again. Raises nothing.
        """
        ...

    # Reads: of what is durable.

    async def session(self, session_id: str) -> Session:
        """The session as it is."""
        ...

    async def sessions(self, query: Query) -> list[Session]:
        """Sessions in order; at most `query.limit`."""
        ...

    async def revisions(self, session_id: str) -> list[Revision]:
        """The archived revisions, newest first."""
        ...

    async def page(
        self,
        session_id: str,
        *,
        revision: int | None = None,
        generation: int | None = None,
        start: int | None = None,
        total: int | None = None,
        limit: int,
        bytes_max: int,
        order: Order = "asc",
    ) -> Page:
        """Entries of the present history, of an archived `revision`, or of a `generation`.

        Begins at index `start` (default: the first in `order`), counts only the first `total`
        entries as the history (default: all) and ends at `limit` entries or before `bytes_max`, but
        never without one entry. A generation that was replaced is read from its archive, verified
        before the first entry.

        Raises RevisionUnknown, ArchiveMissing, ArchiveCorrupt.
        """
        ...

    async def events(self, session_id: str, *, after_seq: int, limit: int) -> list[Event]:
        """Events of one session, also of a deleted one (its last). Unknown sessions have none."""
        ...

    async def events_of_all(self, *, after_ordinal: int, limit: int) -> list[Event]:
        """Events of every session in the order in which they were committed."""
        ...

    async def last_ordinal(self) -> int:
        """The ordinal of the latest event; 0 when there is none."""
        ...

    async def operation(self, operation_id: str) -> Operation:
        """Raises OperationUnknown."""
        ...

    async def replayed(self, receipt: Receipt) -> Replayed | None:
        """Its outcome if the change was made before: for those that must be prepared at length.

        Raises OperationReused.
        """
        ...

    async def tokens(self) -> list[AccessToken]:
        """All tokens, oldest first."""
        ...

    async def verify(self, session_id: str, *, read: Callable[[int], bool]) -> Verified:
        """Check a session: its rows against each other, and that its archives are there.

        The histories at those revisions for which `read` holds are read whole, and the archives
        among them verified. A fault is no error here; nothing is mended.
        """
        ...

    async def health(self) -> StoreHealth:
        """Whether changes can be made, and the sizes that tell of trouble to come."""
        ...
