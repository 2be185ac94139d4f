"""What the store knows, as the protocol says it."""

from typing import Final, Literal

import msgspec
from msgspec import UNSET

from recapd.protocol import messages
from recapd.storage.entry import encode_time
from recapd.storage.store import AutoCompact, Operation, Revision, Session, Tokens

_METHODS: Final[dict[tuple[bool, bool], Literal["o200k_base", "bytes/4", "o200k_base+bytes/4"]]] = {
    (True, True): "o200k_base+bytes/4",
    (True, False): "o200k_base",
    (False, True): "bytes/4",
    (False, False): "o200k_base",  # nothing at all is counted exactly
}


def wire_tokens(tokens: Tokens) -> messages.Tokens:
    """`counted` is exact, `estimated` is not."""
    method = _METHODS[tokens.counted > 0, tokens.estimated > 0]
    return messages.Tokens(tokens.counted + tokens.estimated, method, tokens.estimated == 0)


def _auto_compact(setting: AutoCompact) -> messages.AutoCompact:
    return msgspec.convert(setting, messages.AutoCompact, from_attributes=True)


def wire_session(session: Session) -> messages.Session:
    return messages.Session(
        session.session_id,
        session.title,
        session.cwd,
        session.labels,
        encode_time(session.created_at_ms),
        encode_time(session.updated_at_ms),
        session.revision,
        session.generation,
        session.entries,
        wire_tokens(session.tokens),
        session.archived_revisions,
        session.durability,
        session.state,
        None
        if session.parent is None
        else messages.Parent(session.parent.session_id, session.parent.revision),
        session.running is not None,
        None if session.auto_compact is None else _auto_compact(session.auto_compact),
    )


def wire_revision(revision: Revision) -> messages.Revision:
    return messages.Revision(
        revision.revision,
        revision.kind,
        revision.operation_id,
        encode_time(revision.archived_at_ms),
        revision.entries,
        wire_tokens(revision.tokens),
        revision.bytes,
        revision.sha256,
    )


def wire_operation(operation: Operation) -> messages.Operation:
    outcome = UNSET if operation.outcome is None else msgspec.Raw(operation.outcome)
    completed = operation.status == "completed"
    return messages.Operation(
        operation.operation_id,
        operation.method,
        operation.session_id,
        operation.status,
        encode_time(operation.started_at_ms),
        None if operation.ended_at_ms is None else encode_time(operation.ended_at_ms),
        outcome if completed else UNSET,
        UNSET if completed else outcome,
    )
