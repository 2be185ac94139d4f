"""What crosses the wire: parameters, results, objects and notifications, as typed structures.

Every document about the protocol is generated from these definitions and `methods.py`
(PROTOCOL.md, preamble). Unknown parameter names are refused; `_meta` is always allowed and never
looked at.
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
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_.:-]{1,128}$(?!\n)",
        description="made by the client; 1 to 128 of A-Z a-z 0-9 _ . : -",
    ),
]
Cursor = Annotated[str, Meta(max_length=4096, description="opaque; from the page before")]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Expected = Annotated[Count, Meta(description="`conflict` where the session is at another")]
Limit = Annotated[int, Meta(ge=1, le=100_000)]
Size = Annotated[int, Meta(ge=1, description="bytes")]
WaitMs = Annotated[int, Meta(ge=0, le=600_000, description="milliseconds")]
Title = Annotated[str, Meta(max_length=1000)]
Cwd = Annotated[str, Meta(max_length=4096)]
# SQLite's JSON functions, which the filter uses, end a text at NUL.
LabelName = Annotated[str, Meta(min_length=1, max_length=128, pattern="^[^\\x00]*$")]
Label = Annotated[str, Meta(max_length=1000, pattern="^[^\\x00]*$")]
Labels = Annotated[dict[LabelName, Label], Meta(max_length=64)]
Instant = Annotated[datetime, Meta(tz=True, description="RFC 3339, with a time zone")]
Time = Annotated[
    str,
    Meta(
        description="RFC 3339 in UTC, with milliseconds",
        extra_json_schema={"format": "date-time"},
    ),
]

Item = Annotated[Raw, Meta(description="kept byte for byte", extra_json_schema={"type": "object"})]
"""One item: an input or output item of the Responses API, or a Chat Completions message."""

LoggedEvent = Annotated[
    Raw,
    Meta(
        description="the parameters of its notification but `subscription_id`, and `method`",
        extra_json_schema={"type": "object"},
    ),
]
Outcome = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]

State = Literal["active", "archived"]
Durability = Literal["durable", "transient"]
Order = Literal["asc", "desc"]
Format = Literal["jsonl", "json", "markdown"]
Redact = Literal["policy", "none"]
Summarizer = Literal["offline", "responses", "chat", "anthropic"]
Scope = Literal[
    "session.read", "history.full", "session.write", "session.compact", "session.delete", "admin"
]


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


class AutoCompact(msgspec.Struct, frozen=True, kw_only=True):
    """When a session is compacted unasked: as soon as it has `at_tokens`. The rest says how."""

    at_tokens: Annotated[int, Meta(ge=1000, le=2**53)]
    keep_recent_tokens: Annotated[Count, Meta(description="less than `at_tokens`")] = 0
    # Shorter than for one compaction: they are part of every answer that has a session.
    instructions: Annotated[str, Meta(min_length=1, max_length=4000)] | None = None
    summarizer: Summarizer | None = None


class Session(msgspec.Struct, frozen=True):
    """A session without its history. `entries` counts them; `busy`: a compaction is running."""

    session_id: str
    title: str | None
    cwd: str | None
    labels: dict[str, str]
    created_at: Time
    updated_at: Time
    revision: int
    generation: int
    entries: int
    tokens: Tokens
    archived_revisions: tuple[int, ...]
    durability: Durability
    state: State
    parent: Parent | None
    busy: bool
    auto_compact: AutoCompact | None = None


class Reminder(msgspec.Struct, frozen=True):
    """Where an item that recapd made itself comes from."""

    generation: int
    operation_id: str
    archived_revision: int


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One item of a history, with the time of its append. The server joins such lines to pages."""

    id: int
    at: Time
    item: Item
    reminder: Reminder | None = None


class Revision(msgspec.Struct, frozen=True):
    """An archived history. `bytes` and `sha256`, which `sha256sum` prints, are of its file."""

    revision: int
    kind: Literal["compaction", "restore", "rewind"]
    operation_id: str
    archived_at: Time
    entries: int
    tokens: Tokens
    bytes: int
    sha256: str


class ArchiveInfo(msgspec.Struct, frozen=True):
    """The archive file that a compaction wrote: its hash, its size, and the entries in it."""

    sha256: str
    bytes: int
    entries: int


class Operation(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a mutation with an operation id ended; `result` or `error` is what its answer was."""

    operation_id: str
    method: str
    session_id: str
    status: Literal["running", "completed", "failed", "cancelled", "skipped"]
    started_at: Time
    ended_at: Time | None = None
    result: Outcome | UnsetType = UNSET
    error: Outcome | UnsetType = UNSET


class AccessToken(msgspec.Struct, frozen=True, kw_only=True):
    """What a token allows, on which sessions (null: all), and until when (null: for ever)."""

    token_id: str
    label: str
    scopes: tuple[Scope, ...]
    sessions: tuple[str, ...] | None
    created_at: Time
    expires_at: Time | None


class AppendWarning(msgspec.Struct, frozen=True):
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
    """What changes take: a mismatch is `conflict`, a known operation id gets what was recorded."""

    operation_id: OperationId | None = None
    expected_revision: Expected | None = None
    expected_generation: Expected | None = None


class ClientInfo(msgspec.Struct, frozen=True):
    """How a client names itself."""

    name: Annotated[str, Meta(max_length=200)]
    version: Annotated[str, Meta(max_length=200)] = ""


class InitializeParams(Params, frozen=True, kw_only=True):
    """Protocol: absent, the latest. With a token the connection may do what that one allows."""

    protocol: int | None = None
    client: ClientInfo | None = None
    token: Annotated[str, Meta(max_length=500)] | None = None


class ShutdownParams(Params, frozen=True, kw_only=True):
    """`deadline_ms`: time in milliseconds for what is under way; absent, as configured."""

    mode: Literal["drain", "now"] = "drain"
    deadline_ms: WaitMs | None = None


class NewAutoCompact(AutoCompact, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As in the session; the summarizer is one that is configured."""


class CreateParams(Params, frozen=True, kw_only=True):
    """Without `session_id` the server makes one. The items are appended in the same change."""

    session_id: SessionId | None = None
    title: Title | None = None
    cwd: Cwd | None = None
    labels: Labels = {}
    durability: Durability = "durable"
    items: list[Item] = []
    auto_compact: NewAutoCompact | None = None
    operation_id: OperationId | None = None


class ListFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All must hold. `title_contains` ignores the case of A to Z; both instants are exclusive."""

    state: State | None = None
    cwd: Cwd | None = None
    labels: Labels = {}
    title_contains: Title | None = None
    updated_after: Instant | None = None
    updated_before: Instant | None = None


class ListParams(Params, frozen=True, kw_only=True):
    """Sessions that are equal in `sort` are ordered by their id. `limit` is in sessions."""

    filter: ListFilter | None = None
    sort: Literal["updated_at", "created_at", "session_id"] = "updated_at"
    order: Order = "desc"
    limit: Limit = 100
    cursor: Cursor | None = None


class GetParams(Params, frozen=True, kw_only=True):
    """A page ends at `limit` entries or before `max_bytes` bytes (1 MiB), but has at least one."""

    session_id: SessionId
    revision: Count | None = None
    limit: Limit = 200
    max_bytes: Size | None = None
    cursor: Cursor | None = None
    order: Order = "asc"
    view: Literal["info", "entries"] = "entries"


class SessionParams(Params, frozen=True, kw_only=True):
    """Which session."""

    session_id: SessionId


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `part`-th of `of` shares; all of them together are the whole, each revision once."""

    part: Annotated[int, msgspec.Meta(ge=1)]
    of: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class VerifyParams(Params, frozen=True, kw_only=True):
    """One session or all: the structure, and with `read_data` every byte, or those of a share."""

    session_id: SessionId | None = None
    read_data: bool = True
    share: Share | None = None


class AppendParams(MutationParams, frozen=True, kw_only=True):
    """As many items as `items_per_append` of the limits says, each of `item_bytes` at most."""

    session_id: SessionId
    items: Annotated[list[Item], Meta(min_length=1)]


class Relevance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Groups of entries that a model grades below `threshold`, from 0 to 1, are left out."""

    threshold: Annotated[float, Meta(ge=0, le=1)] = 0.5


class CompactParams(MutationParams, frozen=True, kw_only=True):
    """All summarizers but `offline` ask a model; a `summary` given here takes the place of any."""

    session_id: SessionId
    summarizer: Summarizer | None = None
    summary: str | None = None
    instructions: Annotated[str, Meta(min_length=1, max_length=20_000)] | None = None
    relevance: bool | Relevance = False
    keep_recent_tokens: Count = 0
    fold_reminders: bool = False
    dry_run: bool = False
    force: bool = False
    wait: bool = True


class RestoreParams(MutationParams, frozen=True, kw_only=True):
    """One of `archived_revisions`; the present one changes nothing."""

    session_id: SessionId
    revision: Count


class RewindParams(MutationParams, frozen=True, kw_only=True):
    """An entry of the present history, the last that stays; 0: none stays."""

    session_id: SessionId
    after_entry_id: Count


class ForkParams(MutationParams, frozen=True, kw_only=True):
    """Absent: the present revision, all its entries, an id from the server, the same title."""

    session_id: SessionId
    revision: Count | None = None
    after_entry_id: Count | None = None
    new_session_id: SessionId | None = None
    title: Title | None = None


class ExportParams(Params, frozen=True, kw_only=True):
    """A chunk has `max_bytes` bytes of UTF-8 at most; absent, 1 MiB."""

    session_id: SessionId
    revision: Count | Literal["current", "all"] = "current"
    format: str = "jsonl"
    redact: Redact = "policy"
    cursor: Cursor | None = None
    max_bytes: Size | None = None


class UpdateParams(MutationParams, frozen=True, kw_only=True):
    """What is absent stays; null clears."""

    session_id: SessionId
    title: Title | UnsetType | None = UNSET
    cwd: Cwd | UnsetType | None = UNSET
    labels: Labels | UnsetType | None = UNSET
    state: State | UnsetType = UNSET
    auto_compact: NewAutoCompact | UnsetType | None = UNSET


class DeleteParams(MutationParams, frozen=True, kw_only=True):
    """Which session."""

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
    """Without `session_id`: all sessions, and `since` is no number, for seq is per session."""

    session_id: SessionId | None = None
    since: Count | Literal["now", "start"] = "now"
    events: list[EventName] | None = None


class UnsubscribeParams(Params, frozen=True, kw_only=True):
    """Which subscription of this connection."""

    subscription_id: Annotated[str, Meta(max_length=128)]


class EventsParams(Params, frozen=True, kw_only=True):
    """Events whose `seq` is over `since`. `wait_ms`: milliseconds to wait for one."""

    session_id: SessionId
    since: Count
    limit: Limit = 1000
    wait_ms: WaitMs = 0


class TokenCreateParams(Params, frozen=True, kw_only=True):
    """`history.full` has `session.read` in it. Absent `sessions`: all; absent `ttl_s`: for ever."""

    label: Annotated[str, Meta(min_length=1, max_length=200)]
    scopes: Annotated[list[Scope], Meta(min_length=1, max_length=6)]
    sessions: Annotated[list[SessionId], Meta(min_length=1, max_length=100)] | None = None
    ttl_s: Annotated[int, Meta(ge=1, le=315_360_000, description="seconds")] | None = None


class TokenRevokeParams(Params, frozen=True, kw_only=True):
    """Either its id or, for one that was found somewhere, the token itself."""

    token_id: OperationId | None = None
    token: Annotated[str, Meta(max_length=500)] | None = None


class OperationParams(Params, frozen=True, kw_only=True):
    """Which operation."""

    operation_id: OperationId


class OperationGetParams(OperationParams, frozen=True, kw_only=True):
    """`wait_ms`: milliseconds to wait for the end of a compaction."""

    wait_ms: WaitMs = 0


class CancelRequestParams(Params, frozen=True, kw_only=True):
    """The id of a request on this connection."""

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
    """What this server takes; `frame_bytes` and `item_bytes` in bytes. Each has its own error."""

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
    """`schema_sha256` is of the file `openrpc.json` of the server."""

    protocol: int
    server: ServerInfo
    limits: Limits
    principal: Principal
    schema_sha256: str


class DiscoverResult(msgspec.Struct, frozen=True, kw_only=True):
    """An OpenRPC document; the members that begin with `x-` are recapd's own."""

    openrpc: str
    info: dict[str, Any]
    methods: list[dict[str, Any]]
    notifications: list[dict[str, Any]] = msgspec.field(name="x-notifications")
    client_notifications: list[dict[str, Any]] = msgspec.field(name="x-client-notifications")
    common_reasons: list[str] = msgspec.field(name="x-common-reasons")
    reasons: dict[str, Any] = msgspec.field(name="x-reasons")
    components: dict[str, dict[str, Any]]


class PingResult(msgspec.Struct, frozen=True):
    """The server's clock."""

    now: Time


class InfoResult(msgspec.Struct, frozen=True):
    """`connections` and `sessions_loaded` count those in use now."""

    protocol: int
    server: ServerInfo
    limits: Limits
    started_at: Time
    connections: int
    sessions_loaded: int


class HealthWarning(msgspec.Struct, frozen=True):
    """`hint` says what helps."""

    reason: str
    hint: str


class DatabaseHealth(msgspec.Struct, frozen=True):
    """Sizes in bytes; `log_bytes` is of the write-ahead log."""

    writable: bool
    bytes: int
    log_bytes: int


class DiskHealth(msgspec.Struct, frozen=True):
    """Free space in bytes, on the disk that holds the store."""

    free_bytes: int


class QueueHealth(msgspec.Struct, frozen=True):
    """Changes that are not durable yet, and compactions that are running."""

    waiting_changes: int
    running_compactions: int


class EventLoopHealth(msgspec.Struct, frozen=True):
    """The longest time since the start for which nobody was served, in milliseconds."""

    longest_stall_ms: float


class HealthResult(msgspec.Struct, frozen=True):
    """`ok`: there are no warnings."""

    ok: bool
    database: DatabaseHealth
    disk: DiskHealth
    queues: QueueHealth
    event_loop: EventLoopHealth
    warnings: tuple[HealthWarning, ...]


class ShutdownResult(msgspec.Struct, frozen=True):
    """Always true: the server has begun to stop."""

    stopping: bool


class MutationResult(msgspec.Struct, frozen=True, kw_only=True):
    """`replayed`: the operation id was known, and this is the result that was recorded for it."""

    replayed: bool | UnsetType = UNSET


class SessionResult(MutationResult, frozen=True):
    """The session after the change."""

    session: Session


class CreateResult(MutationResult, frozen=True):
    """`session_id` stands outside too, for what every client needs first."""

    session_id: str
    session: Session


class ListResult(msgspec.Struct, frozen=True):
    """`next_cursor` is null on the last page."""

    sessions: list[Session]
    next_cursor: str | None


class GetResult(msgspec.Struct, frozen=True):
    """`entries` is absent in view `info`. `revision` is the one that is served."""

    session: Session
    revision: int
    next_cursor: str | None
    redaction: Redaction
    entries: list[Entry] | Raw | UnsetType = UNSET


class RevisionsResult(msgspec.Struct, frozen=True):
    """Newest first."""

    revisions: list[Revision]


class AppendResult(MutationResult, frozen=True):
    """The ids of the new entries, in the order of the items."""

    session: Session
    entry_ids: list[int]
    warnings: list[AppendWarning]


class Usage(msgspec.Struct, frozen=True):
    """What a provider said that an attempt took; null where it did not say."""

    input_tokens: int | None = None
    cached_tokens: int | None = None  # of the input
    output_tokens: int | None = None


class Attempt(msgspec.Struct, frozen=True):
    """A request to a model; `status` is `ok`, or says why there is no answer."""

    provider: str
    status: str
    provider_status: int | None
    provider_code: str | None
    duration_ms: int
    usage: Usage


class PlannedPart(msgspec.Struct, frozen=True):
    """Entries that share a fate, in their order."""

    entry_ids: list[int]
    tokens: Tokens


class PlannedRequest(msgspec.Struct, frozen=True):
    """The first request to the model, word for word but for a random word in its tags."""

    provider: str
    body: Raw


class CompactionPlan(msgspec.Struct, frozen=True):
    """`request` is null where no model is asked, and without `history.full`."""

    instructions: PlannedPart
    reminders: PlannedPart
    tail: PlannedPart
    summarised: PlannedPart
    dropped: PlannedPart
    context_limit: int
    request: PlannedRequest | None


class CompactResult(MutationResult, frozen=True):
    """With `wait: false` only three members are there; `plan` belongs to a `dry_run`."""

    operation_id: str | None  # null for a `dry_run`
    status: Literal["running", "completed", "planned"]
    session: Session
    plan: CompactionPlan | UnsetType = UNSET
    archived_revision: int | UnsetType = UNSET
    archive: ArchiveInfo | UnsetType = UNSET
    entries_before: int | UnsetType = UNSET
    entries_after: int | UnsetType = UNSET
    tokens_before: Tokens | UnsetType = UNSET
    tokens_after: Tokens | UnsetType = UNSET
    carried_over: int | UnsetType = UNSET
    reminder_entry_id: int | UnsetType = UNSET
    quality: str | UnsetType = UNSET
    attempts: int | UnsetType = UNSET
    attempt_log: list[Attempt] | UnsetType = UNSET
    redactions: dict[str, int] | UnsetType = UNSET


class ReplaceResult(MutationResult, frozen=True):
    """`archived_revision` is null where that history was there already, and nothing changed."""

    operation_id: str
    session: Session
    archived_revision: int | None
    entries_before: int
    entries_after: int
    tokens_before: Tokens
    tokens_after: Tokens


class ManifestRevision(msgspec.Struct, frozen=True):
    """One history within an export."""

    revision: int
    current: bool
    entries: int


class Manifest(msgspec.Struct, frozen=True):
    """What an export held, given with its last chunk. `bytes` is the length of all, in UTF-8."""

    session_id: str
    format: Format
    revisions: list[ManifestRevision]
    bytes: int
    redaction: Redaction


class ExportResult(msgspec.Struct, frozen=True):
    """`chunk` is a piece of the text; all of them joined are the export."""

    chunk: str
    next_cursor: str | None
    done: bool
    manifest: Manifest | UnsetType = UNSET


class Fault(msgspec.Struct, frozen=True):
    """What is not as it was written, and in which session and revision."""

    session_id: str
    revision: int | None
    kind: Literal[
        "entries_missing",
        "entries_damaged",
        "events_missing",
        "revisions_missing",
        "archive_missing",
        "archive_corrupt",
        "database_damaged",
    ]


class VerifyResult(msgspec.Struct, frozen=True):
    """Histories `checked`, `bytes` read for it, and the first 1000 faults."""

    checked: int
    bytes: int
    faults: list[Fault]
    faults_total: int


class DeleteResult(MutationResult, frozen=True):
    """False: there was no such session."""

    deleted: bool


class SubscribeResult(msgspec.Struct, frozen=True):
    """Events over `from_seq` follow. `reset`: `since` is not of this log; read the session anew."""

    subscription_id: str
    from_seq: int
    resume: Literal["exact", "reset"]


class UnsubscribeResult(msgspec.Struct, frozen=True):
    """False: the connection has no such subscription."""

    unsubscribed: bool


class EventsResult(msgspec.Struct, frozen=True):
    """Go on with `next_seq` as `since`. `reset`: `since` is not of this log."""

    events: list[LoggedEvent]
    next_seq: int
    resume: Literal["exact", "reset"]


class OperationResult(msgspec.Struct, frozen=True):
    """The operation as it is now."""

    operation: Operation


class CancelResult(msgspec.Struct, frozen=True):
    """`cancelled`: it ended so, now or before."""

    operation: Operation
    cancelled: bool


class TokenCreateResult(AccessToken, frozen=True, kw_only=True):
    """The token is shown this once: only its SHA-256 is kept."""

    token: str


class TokenListResult(msgspec.Struct, frozen=True):
    """Oldest first."""

    tokens: list[AccessToken]


class TokenRevokeResult(msgspec.Struct, frozen=True):
    """False: there is no such token that the caller may revoke."""

    revoked: bool


# Notifications.


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What every durable notification carries."""

    subscription_id: str
    session_id: str
    seq: int
    prev_seq: int
    revision: int
    generation: int
    at: Time
    operation_id: str | UnsetType = UNSET


class HistoryReplaced(Event, frozen=True, kw_only=True):
    """`entries_*` and `carried_over` are counts; `reminder_entry_id` is a compaction's."""

    kind: Literal["compaction", "restore", "rewind"]
    from_generation: int
    to_generation: int
    archived_revision: int
    entries_before: int
    entries_after: int
    tokens_before: Tokens
    tokens_after: Tokens
    retained_entry_ids: list[int]
    reminder_entry_id: int | None
    carried_over: int


class HistoryAppended(Event, frozen=True, kw_only=True):
    """Every id from the first to the last."""

    first_entry_id: int
    last_entry_id: int


class CompactionFinished(Event, frozen=True, kw_only=True):
    """`reason` is that of the error, or `session_deleted`; `quality` that of the summary."""

    status: Literal["completed", "failed", "cancelled", "skipped"]
    reason: str | UnsetType = UNSET
    quality: str | UnsetType = UNSET


class CompactionProgress(msgspec.Struct, frozen=True):
    """`done` of `total`: entries while it is in `partition`, else steps. Ten a second at most."""

    subscription_id: str
    session_id: str
    operation_id: str
    stage: str
    done: int
    total: int


class ServerDraining(msgspec.Struct, frozen=True):
    """Sent once to every subscription; the connection ends by `deadline` at the latest."""

    subscription_id: str
    deadline: Time


class SubscriptionEnded(msgspec.Struct, frozen=True):
    """Nothing more is told: the token that the connection presented is no longer good."""

    subscription_id: str
    reason: Literal["unauthenticated"]
