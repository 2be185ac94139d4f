"""Every error that crosses the wire: one class for each reason of PROTOCOL.md §6.

    RpcError
    ├── ParseError                -32700  parse_error
    ├── InvalidRequest            -32600  invalid_request
    │   ├── DuplicateRequestId    -32600  duplicate_request_id
    │   ├── BatchTooLarge         -32600  batch_too_large
    │   └── TooDeep               -32600  too_deep
    ├── MethodNotFound            -32601  method_not_found
    ├── InvalidParams             -32602  invalid_params
    ├── InternalError             -32603  internal_error
    ├── RequestCancelled          -32800  request_cancelled
    ├── Overloaded                -32001  overloaded
    ├── ShuttingDown              -32003  shutting_down
    ├── Unauthenticated           -32004  unauthenticated
    ├── UnsupportedProtocol       -32005  unsupported_protocol
    ├── FrameTooLarge             -32007  frame_too_large
    ├── NotFound                    1001  not_found
    ├── Forbidden                   1002  forbidden
    ├── Conflict                    1003  conflict
    ├── OperationIdReused           1004  operation_id_reused
    ├── AlreadyExists               1005  already_exists
    ├── SessionArchived             1006  session_archived
    ├── CompactionRunning           1007  compaction_running
    ├── CompactionError             1008
    │   ├── CompactionFailed        1008  compaction_failed
    │   ├── Superseded              1008  superseded
    │   ├── ResultTooLarge          1008  result_too_large
    │   ├── NothingToCompact        1008  nothing_to_compact
    │   ├── NoGain                  1008  no_gain
    │   ├── BreakerOpen             1008  breaker_open
    │   ├── Cancelled               1008  cancelled
    │   └── AlreadyCommitted        1008  already_committed
    ├── ArchiveError                1009
    │   ├── RevisionNotFound        1009  revision_not_found
    │   ├── ArchiveMissing          1009  archive_missing
    │   └── ArchiveCorrupt          1009  archive_corrupt
    ├── CursorInvalid               1010  cursor_invalid
    ├── ItemTooLarge                1011  item_too_large
    ├── InvalidItem                 1012  invalid_item
    ├── StorageError                1013  storage_error
    │   ├── StorageFull             1013  storage_full
    │   ├── StorageReadonly         1013  storage_readonly
    │   └── OutcomeUnknown          1013  outcome_unknown
    └── UnsupportedFormat           1014  unsupported_format

Clients switch on `reason`; a code is a family. Messages and hints are constants of this program:
they never hold input, paths or exception text. What varies travels in `data`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypedDict, cast

import msgspec

from recapd.protocol.messages import Attempt


class Expectation(TypedDict):
    """What was expected at one place of the parameters, e.g. `$.items[3]` and `object`."""

    path: str
    expected: str


class RpcError(Exception):
    """An error answer. Raised as such only by `from_wire`, for a reason this version does not know.

    `data` holds what is particular to this occurrence, as it appears on the wire beside `reason`,
    `retryable` and `hint`; entries that are None are left out.

    `retryable` promises that the very same request may succeed later without being changed.
    """

    code: int = -32603
    reason: str = "unknown"
    retryable: bool = False
    text: str = "The request failed."
    hint: str | None = None

    def __init__(
        self, *, hint: str | None = None, retryable: bool | None = None, **data: object
    ) -> None:
        super().__init__(self.text)
        self.data: dict[str, Any] = {
            name: value for name, value in data.items() if value is not None
        }
        if hint is not None:
            self.hint = hint
        if retryable is not None:
            self.retryable = retryable

    @property
    def message(self) -> str:
        """The sentence on the wire: the text of the class, or what the server said."""
        return str(self)

    def to_wire(self) -> dict[str, Any]:
        """Return the `error` member of a response (JSON-RPC 2.0, section 5.1)."""
        data = {"reason": self.reason, "retryable": self.retryable, **self.data}
        if self.hint is not None:
            data["hint"] = self.hint
        return {"code": self.code, "message": self.message, "data": data}


class ParseError(RpcError):
    """What arrived is not strict JSON in UTF-8."""

    code = -32700
    reason = "parse_error"
    text = "The message is not valid JSON."


class InvalidRequest(RpcError):
    """The JSON is not a JSON-RPC 2.0 request; `hint` names the rule."""

    code = -32600
    reason = "invalid_request"
    text = "The message is not a valid request."


class DuplicateRequestId(InvalidRequest):
    """A request with the same id is still in flight on this connection."""

    reason = "duplicate_request_id"
    text = "A request with this id is still in flight."


class BatchTooLarge(InvalidRequest):
    """The batch holds more entries than the announced limit; none was looked at."""

    reason = "batch_too_large"
    text = "The batch has too many entries."

    def __init__(self, *, limit: int) -> None:
        super().__init__(limit=limit)


class TooDeep(InvalidRequest):
    """Arrays and objects are nested deeper than the announced limit."""

    reason = "too_deep"
    text = "The message is nested too deeply."

    def __init__(self, *, limit: int) -> None:
        super().__init__(limit=limit)


class MethodNotFound(RpcError):
    """The method does not exist."""

    code = -32601
    reason = "method_not_found"
    text = "There is no such method."
    hint = "rpc.discover lists the methods."


class InvalidParams(RpcError):
    """A parameter is missing, unknown or of the wrong kind; `errors` names each by its path."""

    code = -32602
    reason = "invalid_params"
    text = "The parameters are not valid."

    def __init__(self, *, errors: Sequence[Expectation], hint: str | None = None) -> None:
        super().__init__(hint=hint, errors=list(errors))

    @classmethod
    def at(cls, path: str, expected: str) -> Self:
        """Return the error for one place; neither argument may hold a value that was sent."""
        return cls(errors=[{"path": path, "expected": expected}])


class InternalError(RpcError):
    """A fault of the server; the log tells more under `incident`."""

    code = -32603
    reason = "internal_error"
    text = "An unexpected fault happened in the server."

    def __init__(self, *, incident: str) -> None:
        super().__init__(incident=incident)


class RequestCancelled(RpcError):
    """The client cancelled the request with `$/cancelRequest` before it ended."""

    code = -32800
    reason = "request_cancelled"
    text = "The request was cancelled."


class Overloaded(RpcError):
    """Too much at once: nothing was done; try again after `retry_after_ms`."""

    code = -32001
    reason = "overloaded"
    retryable = True
    text = "The server has too much to do."

    def __init__(self, *, retry_after_ms: int) -> None:
        super().__init__(retry_after_ms=retry_after_ms)


class ShuttingDown(RpcError):
    """The server is stopping: nothing was done; the next process will answer."""

    code = -32003
    reason = "shutting_down"
    retryable = True
    text = "The server is shutting down."


class Unauthenticated(RpcError):
    """The token is unknown, expired or revoked."""

    code = -32004
    reason = "unauthenticated"
    text = "The token is not valid."


class UnsupportedProtocol(RpcError):
    """The client asked for a protocol version that the server does not speak."""

    code = -32005
    reason = "unsupported_protocol"
    text = "This protocol version is not supported."

    def __init__(self, *, supported: Sequence[int]) -> None:
        super().__init__(supported=list(supported))


class FrameTooLarge(RpcError):
    """A frame is longer than the announced limit; the connection ends."""

    code = -32007
    reason = "frame_too_large"
    text = "The message is too large."

    def __init__(self, *, limit_bytes: int) -> None:
        super().__init__(limit_bytes=limit_bytes)


class NotFound(RpcError):
    """It does not exist, or the caller may not see it: both are the same bytes."""

    code = 1001
    reason = "not_found"
    text = "Not found."

    def __init__(self, what: str = "session") -> None:
        """`what` is the kind of thing (`session`, `operation`, `entry`), never its id."""
        super().__init__(what=what)


class Forbidden(RpcError):
    """The principal lacks `scope`, or its token is for other sessions."""

    code = 1002
    reason = "forbidden"
    text = "This principal may not do that."

    def __init__(self, *, scope: str | None = None, hint: str | None = None) -> None:
        super().__init__(scope=scope, hint=hint)


class Conflict(RpcError):
    """The session is not at the expected revision or generation; `data` has the actual ones."""

    code = 1003
    reason = "conflict"
    text = "The session has changed."

    def __init__(self, *, revision: int, generation: int) -> None:
        super().__init__(revision=revision, generation=generation)


class OperationIdReused(RpcError):
    """The operation id was used before with other parameters."""

    code = 1004
    reason = "operation_id_reused"
    text = "This operation id was used with other parameters."


class AlreadyExists(RpcError):
    """The id is taken."""

    code = 1005
    reason = "already_exists"
    text = "This id is already in use."


class SessionArchived(RpcError):
    """The session is archived and takes no changes."""

    code = 1006
    reason = "session_archived"
    text = "The session is archived."
    hint = "Set its state to active with session.update first."


class CompactionRunning(RpcError):
    """The session is being compacted by the operation named in `data`."""

    code = 1007
    reason = "compaction_running"
    retryable = True
    text = "A compaction of this session is running."

    def __init__(self, *, operation_id: str) -> None:
        super().__init__(operation_id=operation_id)


class CompactionError(RpcError):
    """A compaction ended without its result; the history is as it was. Raised by its kinds."""

    code = 1008


class CompactionFailed(CompactionError):
    """A stage failed; `provider_status` is the HTTP status where a model was asked.

    Every attempt to ask one stands in `attempt_log`.
    """

    reason = "compaction_failed"
    text = "The compaction failed; the history is unchanged."

    def __init__(
        self,
        *,
        stage: str,
        provider_status: int | None = None,
        retryable: bool = False,
        retry_after_ms: int | None = None,
        hint: str | None = None,
        attempt_log: list[Attempt] | None = None,
    ) -> None:
        super().__init__(
            hint=hint,
            retryable=retryable,
            stage=stage,
            provider_status=provider_status,
            retry_after_ms=retry_after_ms,
            attempt_log=msgspec.to_builtins(attempt_log) if attempt_log else None,
        )

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """The attempts to ask a model, first to last."""
        return msgspec.convert(self.data.get("attempt_log", ()), tuple[Attempt, ...])


class Superseded(CompactionError):
    """Another replacement of the history was committed first."""

    reason = "superseded"
    retryable = True
    text = "The history was replaced meanwhile; this compaction wrote nothing."


class ResultTooLarge(CompactionError):
    """The replacement would have `tokens`, more than `context_limit` allows."""

    reason = "result_too_large"
    text = "The result would exceed the context limit; the history is unchanged."

    def __init__(self, *, tokens: int, context_limit: int, parts: Mapping[str, int]) -> None:
        """`parts`: the tokens of instructions, reminders, summary and tail."""
        super().__init__(tokens=tokens, context_limit=context_limit, parts=dict(parts))


class NothingToCompact(CompactionError):
    """There is nothing but instructions and reminders to summarise."""

    reason = "nothing_to_compact"
    text = "There is nothing to compact."
    hint = "Use force to compact all the same."


class NoGain(CompactionError):
    """A compaction that nobody asked for would not have got the history below what it was."""

    reason = "no_gain"
    text = "Compacting would not have made the history smaller; it is unchanged."
    hint = "Raise at_tokens of auto_compact, or compact with other parameters."


class BreakerOpen(CompactionError):
    """Compactions that nobody asked for wait: too many in a row have failed."""

    reason = "breaker_open"
    retryable = True
    text = "Automatic compaction waits, since the last ones failed; the history is unchanged."
    hint = "session.compact is not held up, and its success ends the waiting."

    def __init__(self, *, retry_after_ms: int) -> None:
        super().__init__(retry_after_ms=retry_after_ms)


class Cancelled(CompactionError):
    """The operation was cancelled before its commit."""

    reason = "cancelled"
    text = "The operation was cancelled; the history is unchanged."


class AlreadyCommitted(CompactionError):
    """The cancel came too late: the operation's result stands."""

    reason = "already_committed"
    text = "The operation is already committed."
    hint = "operation.get has its result."


class ArchiveError(RpcError):
    """An archived history cannot be served; current history never takes its place."""

    code = 1009

    def __init__(self, *, revision: int) -> None:
        super().__init__(revision=revision)


class RevisionNotFound(ArchiveError):
    """The session has no such archived revision."""

    reason = "revision_not_found"
    text = "The session has no such revision."
    hint = "session.revisions lists the archived ones."


class ArchiveMissing(ArchiveError):
    """The file of this revision is gone."""

    reason = "archive_missing"
    text = "The archive of this revision is missing."
    hint = "Put the file back from a backup."


class ArchiveCorrupt(ArchiveError):
    """The file of this revision is damaged or belongs to another."""

    reason = "archive_corrupt"
    text = "The archive of this revision is damaged."
    hint = "Put the file back from a backup."


class CursorInvalid(RpcError):
    """The cursor was not made by this server for this request."""

    code = 1010
    reason = "cursor_invalid"
    text = "The cursor is not valid here."
    hint = "Start again without a cursor."


class ItemTooLarge(RpcError):
    """The item at `index` is longer than the limit; nothing was appended."""

    code = 1011
    reason = "item_too_large"
    text = "An item is too large."

    def __init__(self, *, index: int, limit_bytes: int) -> None:
        super().__init__(index=index, limit_bytes=limit_bytes)


class InvalidItem(RpcError):
    """An item does not have the shape its type asks for; nothing was appended."""

    code = 1012
    reason = "invalid_item"
    text = "An item is not valid."

    def __init__(self, *, errors: Sequence[Expectation]) -> None:
        super().__init__(errors=list(errors))


class StorageError(RpcError):
    """The store failed; the session is as it was."""

    code = 1013
    reason = "storage_error"
    retryable = True
    text = "The store failed; nothing was changed."


class StorageFull(StorageError):
    """The disk, a quota or a size limit is reached; the session is as it was."""

    reason = "storage_full"
    text = "The store is full; nothing was changed."
    hint = "Free space: service resumes by itself."


class StorageReadonly(StorageError):
    """The store does not take writes; reading goes on."""

    reason = "storage_readonly"
    retryable = False
    text = "The store is read-only."


class OutcomeUnknown(StorageError):
    """The commit could not be established either way; it happens at most once."""

    reason = "outcome_unknown"
    text = "It could not be established whether the change was committed."
    hint = "Ask operation.get, or repeat with the same operation_id."


class UnsupportedFormat(RpcError):
    """The export or import format is not one of `supported`."""

    code = 1014
    reason = "unsupported_format"
    text = "This format is not supported."

    def __init__(self, *, supported: Sequence[str]) -> None:
        super().__init__(supported=list(supported))


def _with_reason(parent: type[RpcError]) -> Iterator[type[RpcError]]:
    for kind in parent.__subclasses__():
        if "reason" in vars(kind):
            yield kind
        yield from _with_reason(kind)


ERRORS: tuple[type[RpcError], ...] = tuple(_with_reason(RpcError))
"""Every class that has a reason, in the order of the tree: what the generated reference lists."""

_KINDS = {kind.reason: kind for kind in ERRORS}


def error_for(reason: str, data: Mapping[str, Any] | None = None) -> RpcError:
    """Return the error of this reason, with `data` taken as it is (from the wire or the store).

    An unknown reason gives a plain `RpcError` that carries it.
    """
    kind = _KINDS.get(reason, RpcError)
    error = kind.__new__(kind)
    fields = dict(data or {})
    fields.pop("reason", None)
    hint, retryable = fields.pop("hint", None), fields.pop("retryable", None)
    RpcError.__init__(
        error,
        hint=hint if isinstance(hint, str) else None,
        retryable=retryable if isinstance(retryable, bool) else None,
    )
    error.data = fields
    error.reason = reason
    return error


def from_wire(wire: Mapping[str, Any]) -> RpcError:
    """Return the error that the `error` member of a response stands for, ready to be raised.

    Whatever a server sends gives an error: missing or malformed members fall back to defaults.
    """
    code, message, data = wire.get("code"), wire.get("message"), wire.get("data")
    fields = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    error = error_for(str(fields.get("reason", RpcError.reason)), fields)
    if isinstance(code, int):
        error.code = code
    if isinstance(message, str):
        error.args = (message,)
    return error
