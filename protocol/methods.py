"""The one table of methods: what each takes, gives, needs and may refuse.

Dispatch, the OpenRPC document and the reference are made from it.
"""

from dataclasses import dataclass
from typing import Final, get_args

import msgspec

from recapd.protocol import errors as e
from recapd.protocol import messages as m

Scope = m.Scope
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)


@dataclass(frozen=True, slots=True)
class Method:
    """One row. `scope` None: anybody who may connect. `errors` are those beyond `COMMON_ERRORS`.

    `inline`: it neither waits nor reads the disk, so it is answered between two reads of the
    socket, without a task of its own. `makes`: the parameter with the id of a session to be made.
    """

    name: str
    params: type[m.Params]
    result: type[msgspec.Struct]
    summary: str
    scope: Scope | None
    errors: tuple[type[e.RpcError], ...] = ()
    inline: bool = False
    makes: str | None = None


@dataclass(frozen=True, slots=True)
class Notification:
    """A message that answers nothing, and that nothing answers."""

    name: str
    params: type[msgspec.Struct]
    summary: str


COMMON_ERRORS: Final = (
    e.ParseError,
    e.InvalidRequest,
    e.DuplicateRequestId,
    e.BatchTooLarge,
    e.TooDeep,
    e.MethodNotFound,
    e.InvalidParams,
    e.InternalError,
    e.RequestCancelled,
    e.Overloaded,
    e.ShuttingDown,
    e.FrameTooLarge,
    e.Forbidden,
    e.Unauthenticated,
)
"""What any request may meet."""

OPERATION_ERRORS: Final = (e.NoGain, e.BreakerOpen)
"""How only an operation ends that no request asked for: what `operation.get` tells of it."""

_STORAGE: Final = (e.StorageError, e.StorageFull, e.StorageReadonly)
_CHANGE: Final = (e.NotFound, e.Conflict, e.OperationIdReused, *_STORAGE, e.OutcomeUnknown)
_ARCHIVE: Final = (e.RevisionNotFound, e.ArchiveMissing, e.ArchiveCorrupt)
_ITEMS: Final = (e.InvalidItem, e.ItemTooLarge)

METHODS: Final[dict[str, Method]] = {
    method.name: method
    for method in (
        Method(
            "protocol.initialize",
            m.InitializeParams,
            m.InitializeResult,
            "Name the client and agree on a protocol version. Optional; the first request or none.",
            None,
            (e.UnsupportedProtocol,),
            inline=True,
        ),
        Method(
            "protocol.ping",
            m.Params,
            m.PingResult,
            "Answer at once with the server's time. Never waits behind a session.",
            None,
            inline=True,
        ),
        Method(
            "rpc.discover",
            m.Params,
            m.DiscoverResult,
            "This description of the protocol, as an OpenRPC document.",
            None,
            inline=True,
        ),
        Method(
            "server.info",
            m.Params,
            m.InfoResult,
            "What this server is, and its limits.",
            None,
            inline=True,
        ),
        Method(
            "server.health",
            m.Params,
            m.HealthResult,
            "How database, disk and queues are doing, with a hint for each warning.",
            None,
            _STORAGE,
        ),
        Method(
            "server.shutdown",
            m.ShutdownParams,
            m.ShutdownResult,
            "Stop the server: after what is under way (`drain`), or now. Either way, what was"
            " acknowledged stays.",
            "admin",
            inline=True,
        ),
        Method(
            "session.create",
            m.CreateParams,
            m.CreateResult,
            "Make a session, with its first items where there are any.",
            "session.write",
            (e.AlreadyExists, e.OperationIdReused, *_ITEMS, *_STORAGE, e.OutcomeUnknown),
            inline=True,
            makes="session_id",
        ),
        Method(
            "session.list",
            m.ListParams,
            m.ListResult,
            "Sessions in order, page by page. How long their histories are does not matter.",
            "session.read",
            (e.CursorInvalid, *_STORAGE),
        ),
        Method(
            "session.get",
            m.GetParams,
            m.GetResult,
            "A session and a page of its history, the present one or an archived revision. A cursor"
            " pins its revision: a page never mixes two.",
            "session.read",
            (e.NotFound, e.CursorInvalid, *_ARCHIVE, *_STORAGE),
        ),
        Method(
            "session.revisions",
            m.SessionParams,
            m.RevisionsResult,
            "The archived revisions, newest first.",
            "session.read",
            (e.NotFound, *_STORAGE),
        ),
        Method(
            "session.verify",
            m.VerifyParams,
            m.VerifyResult,
            "Check what is stored, of one session or of all: rows against each other, archives"
            " against their hashes. It mends nothing, and others are served meanwhile.",
            "session.read",
            (e.NotFound, *_STORAGE),
        ),
        Method(
            "session.append",
            m.AppendParams,
            m.AppendResult,
            "Add items to the end of the history, all or none. Answered when they are durable."
            " Line breaks between the tokens of an item become spaces; every other byte is kept.",
            "session.write",
            (*_CHANGE, e.SessionArchived, *_ITEMS),
            inline=True,
        ),
        Method(
            "session.compact",
            m.CompactParams,
            m.CompactResult,
            "Archive the history and replace it by instructions, reminders and one new summary.",
            "session.compact",
            (
                *_CHANGE,
                e.SessionArchived,
                e.CompactionRunning,
                e.CompactionFailed,
                e.Superseded,
                e.ResultTooLarge,
                e.NothingToCompact,
                e.Cancelled,
            ),
        ),
        Method(
            "session.restore",
            m.RestoreParams,
            m.ReplaceResult,
            "Archive the history and put an archived one in its place, entry for entry.",
            "session.write",
            (*_CHANGE, e.SessionArchived, *_ARCHIVE),
        ),
        Method(
            "session.rewind",
            m.RewindParams,
            m.ReplaceResult,
            "Archive the history and drop every entry behind one.",
            "session.write",
            (*_CHANGE, e.SessionArchived),
        ),
        Method(
            "session.fork",
            m.ForkParams,
            m.SessionResult,
            "Make a session with the entries of another, at its present or an archived revision.",
            "session.write",
            (*_CHANGE, e.AlreadyExists, *_ARCHIVE),
            makes="new_session_id",
        ),
        Method(
            "session.export",
            m.ExportParams,
            m.ExportResult,
            "A history, or all of them, as text in chunks. `jsonl` is one item a line, exactly as"
            " sent where `redact` is `none`, which needs the scope `history.full`; the other"
            " formats also tell ids, times and revisions.",
            "session.read",
            (e.NotFound, e.CursorInvalid, e.UnsupportedFormat, *_ARCHIVE, *_STORAGE),
        ),
        Method(
            "session.update",
            m.UpdateParams,
            m.SessionResult,
            "Change title, cwd, labels, state or auto_compact. What is absent stays, null clears.",
            "session.write",
            _CHANGE,
            inline=True,
        ),
        Method(
            "session.delete",
            m.DeleteParams,
            m.DeleteResult,
            "Remove a session with its entries, events and archives. False when there is none.",
            "session.delete",
            (e.NotFound, e.Conflict, e.OperationIdReused, *_STORAGE, e.OutcomeUnknown),
        ),
        Method(
            "session.subscribe",
            m.SubscribeParams,
            m.SubscribeResult,
            "Receive the events of one session or of all: first this answer, then what was missed,"
            " then live.",
            "session.read",
            (e.NotFound, *_STORAGE),
        ),
        Method(
            "session.unsubscribe",
            m.UnsubscribeParams,
            m.UnsubscribeResult,
            "End a subscription of this connection.",
            "session.read",
            inline=True,
        ),
        Method(
            "session.events",
            m.EventsParams,
            m.EventsResult,
            "Events after `since`; waits up to `wait_ms` for the first.",
            "session.read",
            (e.NotFound, *_STORAGE),
        ),
        Method(
            "operation.get",
            m.OperationGetParams,
            m.OperationResult,
            "How an operation ended, also after a restart; waits up to `wait_ms` for its end.",
            "session.read",
            (e.NotFound, *_STORAGE),
        ),
        Method(
            "operation.cancel",
            m.OperationParams,
            m.CancelResult,
            "Cancel a running compaction. After its commit: `already_committed`.",
            "session.compact",
            (e.NotFound, e.AlreadyCommitted, *_STORAGE),
        ),
        Method(
            "token.create",
            m.TokenCreateParams,
            m.TokenCreateResult,
            "Make a token for a peer that is to do less than its owner may. It gives no more than"
            " its maker has, and for no longer.",
            "admin",
            (*_STORAGE, e.OutcomeUnknown),
        ),
        Method(
            "token.list",
            m.Params,
            m.TokenListResult,
            "The tokens that there are, without what is secret; with a token those made with it.",
            "admin",
            _STORAGE,
        ),
        Method(
            "token.revoke",
            m.TokenRevokeParams,
            m.TokenRevokeResult,
            "End a token and those made with it, at once: who presented one is refused whatever it"
            " asks or waits for. A token ends only those made with it.",
            "admin",
            (*_STORAGE, e.OutcomeUnknown),
        ),
    )
}

CANCEL_REQUEST: Final = "$/cancelRequest"

CLIENT_NOTIFICATIONS: Final[tuple[Notification, ...]] = (
    Notification(
        CANCEL_REQUEST,
        m.CancelRequestParams,
        "Cancel a request. It still gets exactly one answer; ids not under way are ignored.",
    ),
)
"""What a client sends, beside methods whose answer it does not want."""

NOTIFICATIONS: Final[tuple[Notification, ...]] = (
    Notification(
        "history.replaced",
        m.HistoryReplaced,
        "The history was replaced; exactly one for each generation.",
    ),
    Notification("history.appended", m.HistoryAppended, "Items were added."),
    Notification("session.created", m.Event, "The session was made."),
    Notification(
        "session.updated", m.Event, "Title, cwd, labels, state or auto_compact were changed."
    ),
    Notification("session.deleted", m.Event, "The session was removed."),
    Notification("compaction.started", m.Event, "A compaction began."),
    Notification(
        "compaction.finished",
        m.CompactionFinished,
        "It ended; exactly one for each start, also across a crash.",
    ),
    Notification(
        "compaction.progress", m.CompactionProgress, "How far it is. Not durable, not in the log."
    ),
    Notification("server.draining", m.ServerDraining, "The server stops by the deadline."),
    Notification(
        "subscription.ended", m.SubscriptionEnded, "It is over; nothing more is told of it."
    ),
)
