"""Rows of the tables, as the writer and the readers both see them."""

import sqlite3
from typing import Any, Final

import msgspec

from recapd.storage.database import Damaged
from recapd.storage.errors import OperationReused, OperationUnknown, UnknownSession
from recapd.storage.store import (
    AutoCompact,
    Durability,
    Operation,
    Parent,
    Receipt,
    Replayed,
    Revision,
    Session,
    State,
    Tokens,
)

POSITION_BITS: Final = 32  # of a position that count within a session: 4 thousand million entries


class SessionRow(msgspec.Struct, array_like=True):
    """A row of `sessions`, as the batch has changed it so far."""

    key: int
    session_id: str
    title: str | None
    cwd: str | None
    labels: dict[str, str]
    auto_compact: AutoCompact | None
    created_at_ms: int
    updated_at_ms: int
    durability: Durability
    state: State
    revision: int
    generation: int
    base: int
    entries: int
    tokens_counted: int
    tokens_estimated: int
    next_entry_id: int
    seq: int
    running: str | None
    parent: Parent | None
    archived_revisions: tuple[int, ...]

    def session(self) -> Session:
        """The row as the Store shows it."""
        return Session(
            self.session_id,
            self.title,
            self.cwd,
            self.labels,
            self.created_at_ms,
            self.updated_at_ms,
            self.durability,
            self.state,
            self.revision,
            self.generation,
            self.entries,
            Tokens(self.tokens_counted, self.tokens_estimated),
            self.archived_revisions,
            self.next_entry_id,
            self.seq,
            self.running,
            self.parent,
            self.auto_compact,
        )


_decode_row = msgspec.json.Decoder(SessionRow).decode


def session_row(row: tuple[str]) -> SessionRow:
    """From a row that SELECT_SESSION gave. Raises Damaged."""
    try:
        return _decode_row(row[0])
    except (msgspec.MsgspecError, TypeError) as error:  # the tables are STRICT: nobody wrote it
        raise Damaged("a session is not what was written") from error


# One value of JSON for a row: SQLite locks the connection for each column that is fetched, and in
# one piece a row is decoded five times faster. In the order of the fields of SessionRow; last the
# archived revisions, newest first.
SELECT_SESSION: Final = (
    "SELECT json_array(key, session_id, title, cwd, json(labels), json(auto_compact),"
    " created_at_ms, updated_at_ms, durability, state, revision, generation, base, entries,"
    " tokens_counted, tokens_estimated, next_entry_id, seq, running, json(parent),"
    " json(CASE WHEN generation = 0 THEN '[]' ELSE"
    " (SELECT json_group_array(revision) FROM (SELECT revision FROM archives"
    " WHERE archives.key = sessions.key ORDER BY revision DESC)) END)) FROM sessions"
)


def find_session(db: sqlite3.Connection, session_id: str) -> SessionRow:
    """Raises UnknownSession."""
    row = db.execute(f"{SELECT_SESSION} WHERE session_id = ?", (session_id,)).fetchone()
    if row is None:
        raise UnknownSession
    return session_row(row)


def find_operation(db: sqlite3.Connection, operation_id: str) -> Operation:
    """Raises OperationUnknown."""
    row = db.execute(
        "SELECT operation_id, method, session_id, status, started_at_ms, ended_at_ms, outcome"
        " FROM operations WHERE operation_id = ?",
        (operation_id,),
    ).fetchone()
    if row is None:
        raise OperationUnknown
    return Operation(*row)


def find_replayed(db: sqlite3.Connection, receipt: Receipt) -> Replayed | None:
    """The outcome of a change that was made before. Raises OperationReused."""
    found = db.execute(
        "SELECT method, digest FROM operations WHERE operation_id = ?", (receipt.operation_id,)
    ).fetchone()
    if found is None:
        return None
    if found != (receipt.method, receipt.digest):
        raise OperationReused
    return Replayed(find_operation(db, receipt.operation_id))


def last_ordinal(db: sqlite3.Connection) -> int:
    """The ordinal of the latest event; 0 when there is none."""
    (ordinal,) = db.execute("SELECT coalesce(max(ordinal), 0) FROM events").fetchone()
    return int(ordinal)


SELECT_REVISION: Final = (
    "SELECT revision, generation, kind, operation_id, archived_at_ms, entries, tokens_counted,"
    " tokens_estimated, bytes, sha256 FROM archives"
)


def revision_of(row: tuple[Any, ...]) -> Revision:
    """From a row that SELECT_REVISION gave. Raises Damaged."""
    values: list[Any] = [*row[:6], Tokens(row[6], row[7]), *row[8:]]
    named = dict(zip(Revision.__struct_fields__, values, strict=True))
    try:
        return msgspec.convert(named, Revision)
    except msgspec.ValidationError as error:
        raise Damaged("a revision is not what was written") from error
