"""What crosses the wire: parameters, results, objects and notifications, as typed structures.

Every document about the protocol is generated from these definitions and `methods.py` (PROTOCOL.md, preamble).
Unknown parameter names are refused; `_meta` is always allowed and never looked at.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

PROTOCOL_VERSION = 1

SessionId = Annotated[
    str,
    Meta(
        # `(?!\n)`: in Python `$` also matches before a line end that closes the string.
        pattern=r"^[A-Za-z0-9_.:-]{1,128}$(?!\n)",
        description="1 to 128 of A-Z a-z 0-9 _ . : -",
    ),
]
OperationId = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$(?!\n)", description="made by the client")
]
Cursor = Annotated[str, Meta(max_length=4096, description="opaque; from the call before")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Limit = Annotated[int, Meta(ge=1, le=100_000)]
WaitMs = Annotated[int, Meta(ge=0, le=600_000, description="milliseconds")]
Title = Annotated[str, Meta(max_length=1000)]
Cwd = Annotated[str, Meta(max_length=4096)]
LabelName = Annotated[str, Meta(min_length=1, max_length=128)]
Label = Annotated[str, Meta(max_length=1000)]
Labels = Annotated[dict[LabelName, Label], Meta(max_length=64)]
Instant = Annotated[datetime, Meta(tz=True, description="RFC 3339, with a time zone")]

State = Literal["active", "archived"]
Durability = Literal["durable", "transient"]
Order = Literal["asc", "desc"]
Format = Literal["jsonl", "json", "markdown"]
Redact = Literal["policy", "none"]


# Objects.


class Tokens(msgspec.Struct, frozen=True):
    """A size in tokens. `exact`: all of it was counted by `method`, none estimated."""

    count: int
    method: Literal["o200k_base", "bytes/4", "o200k_base+bytes/4"]
    exact: bool


class Parent(msgspec.Struct, frozen=True):
    """The session and revision that a session was forked from."""

    session_id: str
    revision: int


class Session(msgspec.Struct, frozen=True):
    """A session without its history. `busy`: a compaction is running."""

    session_id: str
    title: str | None
    cwd: str | None
    labels: dict[str, str]
    created_at: str
    updated_at: str
    revision: int
    generation: int
    entries: int
    tokens: Tokens
    archived_revisions: tuple[int, ...]
    durability: Durability
    state: State
    parent: Parent | None
    busy: bool
    auto_compact: None = None


class Reminder(msgspec.Struct, frozen=True):
    """Where an item that recapd made itself comes from."""

    generation: int
    operation_id: str
    archived_revision: int


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item of a history, its bytes as they were sent. Documents the lines that pages are made of."""

    id: int
    at: str
    item: Raw
    reminder: Reminder | None = None


class Revision(msgspec.Struct, frozen=True):
    """An archived history. `sha256` is what `sha256sum` prints for its file, `bytes` the size of that file."""

    revision: int
    kind: Literal["compaction", "restore", "rewind"]
    operation_id: str
    archived_at: str
    entries: int
    tokens: Tokens
    bytes: int
    sha256: str


class ArchiveInfo(msgspec.Struct, frozen=True):
    """What `session.compact` says of the archive file that it wrote."""

    sha256: str
    bytes: int
    entries: int


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a mutation with an operation id ended; `result` or `error` is what its answer was."""

    operation_id: str
    method: str
    session_id: str
    status: Literal["running", "completed", "failed", "cancelled", "skipped"]
    started_at: str
    ended_at: str | None = None
    result: Raw | None = None
    error: Raw | None = None


class Warning_(msgspec.Struct, frozen=True):
    """Something accepted that deserves a look."""

    reason: Literal["output_without_call"]
    entry_id: int
    call_id: str


class Redaction(msgspec.Struct, frozen=True):
    """What was replaced in what is served: counts by kind; empty when nothing was."""

    policy: Redact
    counts: dict[str, int]


# Parameters.


class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all parameters; as such, those of a method that has none."""

    meta: Any = msgspec.field(name="_meta", default=None)


class MutationParams(Params, frozen=True, kw_only=True):
    """What any mutation takes: a mismatch is `conflict`, a known operation id replays its recorded result."""

    operation_id: OperationId | None = None
    expected_revision: Count | None = None
    expected_generation: Count | None = None


class ClientInfo(msgspec.Struct, frozen=True):
    """How a client names itself."""

    name: Annotated[str, Meta(max_length=200)]
    version: Annotated[str, Meta(max_length=200)] = ""


class InitializeParams(Params, frozen=True, kw_only=True):
    protocol: int | None = None
    client: ClientInfo | None = None
    token: Annotated[str, Meta(max_length=500)] | None = None


class ShutdownParams(Params, frozen=True, kw_only=True):
    mode: Literal["drain", "now"] = "drain"
    deadline_ms: WaitMs | None = None


class CreateParams(Params, frozen=True, kw_only=True):
    session_id: SessionId | None = None
    title: Title | None = None
    cwd: Cwd | None = None
    labels: Labels = {}
    durability: Durability = "durable"
    items: list[Raw] = []
    operation_id: OperationId | None = None


class ListFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of these must hold. `title_contains` ignores case within ASCII; both instants are exclusive."""

    state: State | None = None
    cwd: Cwd | None = None
    labels: Labels = {}
    title_contains: Title | None = None
    updated_after: Instant | None = None
    updated_before: Instant | None = None


class ListParams(Params, frozen=True, kw_only=True):
    filter: ListFilter | None = None
    sort: Literal["updated_at", "created_at", "session_id"] = "updated_at"
    order: Order = "desc"
    limit: Limit = 100
    cursor: Cursor | None = None


class GetParams(Params, frozen=True, kw_only=True):
    session_id: SessionId
    revision: Count | None = None
    limit: Limit = 200
    max_bytes: Annotated[int, Meta(ge=1)] | None = None
    cursor: Cursor | None = None
    order: Order = "asc"
    view: Literal["info", "entries"] = "entries"


class SessionParams(Params, frozen=True, kw_only=True):
    session_id: SessionId


class AppendParams(MutationParams, frozen=True, kw_only=True):
    session_id: SessionId
    items: Annotated[list[Raw], Meta(min_length=1)]


class CompactParams(MutationParams, frozen=True, kw_only=True):
    session_id: SessionId
    summarizer: Literal["offline"] | None = None
    summary: str | None = None
    keep_recent_tokens: Count = 0
    force: bool = False
    wait: bool = True


class ExportParams(Params, frozen=True, kw_only=True):
    session_id: SessionId
    revision: Count | Literal["current", "all"] = "current"
    format: str = "jsonl"
    redact: Redact = "policy"
    cursor: Cursor | None = None
    max_bytes: Annotated[int, Meta(ge=1)] | None = None


class UpdateParams(MutationParams, frozen=True, kw_only=True):
    session_id: SessionId
    title: Title | None | UnsetType = UNSET
    cwd: Cwd | None | UnsetType = UNSET
    labels: Labels | None | UnsetType = UNSET
    state: State | UnsetType = UNSET


class DeleteParams(MutationParams, frozen=True, kw_only=True):
    session_id: SessionId


EventName = Literal[
    "history.replaced",
    "history.appended",
    "session.created",
    "session.updated",
    "session.deleted",
    "compaction.started",
    "compaction.finished",
    "compaction.progress",
]


class SubscribeParams(Params, frozen=True, kw_only=True):
    """Without `session_id`: every session; `since` is then `now` or `start`, for `seq` is per session."""

    session_id: SessionId | None = None
    since: Count | Literal["now", "start"] = "now"
    events: list[EventName] | None = None


class UnsubscribeParams(Params, frozen=True, kw_only=True):
    subscription_id: Annotated[str, Meta(max_length=128)]


class EventsParams(Params, frozen=True, kw_only=True):
    session_id: SessionId
    since: Count
    limit: Limit = 1000
    wait_ms: WaitMs = 0


class OperationParams(Params, frozen=True, kw_only=True):
    operation_id: OperationId


class OperationGetParams(OperationParams, frozen=True, kw_only=True):
    wait_ms: WaitMs = 0


class CancelRequestParams(Params, frozen=True, kw_only=True):
    id: str | int


# Results.


class ServerInfo(msgspec.Struct, frozen=True):
    """`instance_id` is of this process, `store_id` of the store for ever."""

    name: str
    version: str
    instance_id: str
    store_id: str
    pid: int


class Limits(msgspec.Struct, frozen=True):
    """What this server takes; each has its own error."""

    frame_bytes: int
    batch: int
    in_flight: int
    depth: int
    connections: int
    subscriptions: int
    items_per_append: int
    item_bytes: int


class Principal(msgspec.Struct, frozen=True):
    """Who the caller is, and what that allows."""

    uid: int
    scopes: tuple[str, ...]


class InitializeResult(msgspec.Struct, frozen=True):
    protocol: int
    server: ServerInfo
    limits: Limits
    principal: Principal
    schema_sha256: str


class PingResult(msgspec.Struct, frozen=True):
    now: str


class InfoResult(msgspec.Struct, frozen=True):
    protocol: int
    server: ServerInfo
    limits: Limits
    started_at: str
    connections: int
    sessions_loaded: int


class HealthWarning(msgspec.Struct, frozen=True):
    """`hint` says what helps."""

    reason: str
    hint: str


class DatabaseHealth(msgspec.Struct, frozen=True):
    writable: bool
    bytes: int
    log_bytes: int


class DiskHealth(msgspec.Struct, frozen=True):
    free_bytes: int


class QueueHealth(msgspec.Struct, frozen=True):
    waiting_changes: int
    running_compactions: int


class HealthResult(msgspec.Struct, frozen=True):
    ok: bool
    database: DatabaseHealth
    disk: DiskHealth
    queues: QueueHealth
    warnings: tuple[HealthWarning, ...]


class ShutdownResult(msgspec.Struct, frozen=True):
    stopping: bool


class SessionResult(msgspec.Struct, frozen=True):
    session: Session


class CreateResult(msgspec.Struct, frozen=True):
    """`session_id` stands outside too, for what every client needs first."""

    session_id: str
    session: Session


class ListResult(msgspec.Struct, frozen=True):
    sessions: list[Session]
    next_cursor: str | None


class GetResult(msgspec.Struct, frozen=True):
    """`entries` is absent in view `info`. `revision` is the one that is served."""

    session: Session
    revision: int
    entries: list[Entry] | Raw | UnsetType
    next_cursor: str | None
    redaction: Redaction


class RevisionsResult(msgspec.Struct, frozen=True):
    revisions: list[Revision]


class AppendResult(msgspec.Struct, frozen=True):
    session: Session
    entry_ids: list[int]
    warnings: list[Warning_]


class CompactResult(msgspec.Struct, frozen=True):
    """With `wait: false` only `operation_id`, `status` and `session` are there."""

    operation_id: str
    status: Literal["running", "completed"]
    session: Session
    archived_revision: int | UnsetType = UNSET
    archive: ArchiveInfo | UnsetType = UNSET
    entries_before: int | UnsetType = UNSET
    entries_after: int | UnsetType = UNSET
    tokens_before: Tokens | UnsetType = UNSET
    tokens_after: Tokens | UnsetType = UNSET
    carried_over: int | UnsetType = UNSET
    reminder_entry_id: int | UnsetType = UNSET
    quality: Literal["offline", "client"] | UnsetType = UNSET
    attempts: int | UnsetType = UNSET
    redactions: dict[str, int] | UnsetType = UNSET


class ManifestRevision(msgspec.Struct, frozen=True):
    """One history within an export."""

    revision: int
    current: bool
    entries: int


class Manifest(msgspec.Struct, frozen=True):
    """What an export held, given with its last chunk. `bytes` is the length of all chunks in UTF-8."""

    session_id: str
    format: Format
    revisions: list[ManifestRevision]
    bytes: int
    redaction: Redaction


class ExportResult(msgspec.Struct, frozen=True):
    chunk: str
    next_cursor: str | None
    done: bool
    manifest: Manifest | UnsetType = UNSET


class DeleteResult(msgspec.Struct, frozen=True):
    deleted: bool


class SubscribeResult(msgspec.Struct, frozen=True):
    """Events with a `seq` over `from_seq` follow. `reset`: `since` is not of this log; read the session anew."""

    subscription_id: str
    from_seq: int
    resume: Literal["exact", "reset"]


class UnsubscribeResult(msgspec.Struct, frozen=True):
    unsubscribed: bool


class EventsResult(msgspec.Struct, frozen=True):
    """Each event as its notification's parameters, with `method` beside. Go on with `next_seq` as `since`."""

    events: list[Raw]
    next_seq: int
    resume: Literal["exact", "reset"]


class OperationResult(msgspec.Struct, frozen=True):
    operation: Operation


class CancelResult(msgspec.Struct, frozen=True):
    operation: Operation
    cancelled: bool


# Notifications.


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What every durable notification carries."""

    subscription_id: str
    session_id: str
    seq: int
    prev_seq: int
    revision: int
    generation: int
    at: str
    operation_id: str | UnsetType = UNSET


class HistoryReplaced(Event, frozen=True, kw_only=True):
    kind: Literal["compaction", "restore", "rewind"]
    from_generation: int
    to_generation: int
    archived_revision: int
    entries_before: int
    entries_after: int
    tokens_before: Tokens
    tokens_after: Tokens
    retained_entry_ids: list[int]
    reminder_entry_id: int
    carried_over: int


class HistoryAppended(Event, frozen=True, kw_only=True):
    first_entry_id: int
    last_entry_id: int


class CompactionFinished(Event, frozen=True, kw_only=True):
    status: Literal["completed", "failed", "cancelled", "skipped"]
    reason: str | UnsetType = UNSET
    quality: str | UnsetType = UNSET


class CompactionProgress(msgspec.Struct, frozen=True):
    """Not durable, at most ten a second."""

    subscription_id: str
    session_id: str
    operation_id: str
    stage: str
    done: int
    total: int


class ServerDraining(msgspec.Struct, frozen=True):
    """Sent once to every subscription; the connection ends by `deadline` at the latest."""

    subscription_id: str
    deadline: str
