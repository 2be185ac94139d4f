"""Whether what is stored of a session agrees with itself; without its archive files."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import msgspec

from recapd.storage.entry import decode_entry
from recapd.storage.queries import lines_of, revisions_of, snapshot
from recapd.storage.rows import POSITION_BITS, SessionRow, find_session
from recapd.storage.store import Fault, Revision


def check_session(
    db: sqlite3.Connection, session_id: str, read_lines: bool
) -> tuple[int, list[Revision], list[Fault]]:
    """How many bytes were read, which archives there must be, and what is wrong with the rows.

    Costs what the rows cost to be counted; with `read_lines` also what they cost to be read.
    Raises UnknownSession, sqlite3.Error.
    """
    with snapshot(db):
        row = find_session(db, session_id)
        revisions = revisions_of(db, row)
        faults = [*_rows(db, row), *_revisions(row, revisions)]
        size_bytes = 0
        if read_lines:
            with lines_of(db, row, range(row.entries)) as lines:
                size_bytes, damaged = _read(row, lines)
            if damaged:
                faults.append(Fault(session_id, row.revision, "entries_damaged"))
    return size_bytes, revisions, faults


def _rows(db: sqlite3.Connection, row: SessionRow) -> Iterator[Fault]:
    first = row.key << POSITION_BITS | row.base
    counted = "SELECT count(*) FROM entries WHERE position >= ? AND position < ?"
    (there,) = db.execute(counted, (first, first + row.entries)).fetchone()
    (behind,) = db.execute(
        counted, (first + row.entries, (row.key + 1) << POSITION_BITS)
    ).fetchone()
    if there != row.entries or behind:
        yield Fault(row.session_id, row.revision, "entries_missing")
    events, earliest, latest = db.execute(
        "SELECT count(*), min(seq), max(seq) FROM events WHERE key = ?", (row.key,)
    ).fetchone()
    if not events or latest != row.seq or events != latest - earliest + 1:
        yield Fault(row.session_id, None, "events_missing")


def _revisions(row: SessionRow, revisions: Sequence[Revision]) -> Iterator[Fault]:
    """One archive for each generation that was; revisions and generations rise."""
    rising = [(one.revision, one.generation) for one in reversed(revisions)]
    rising.append((row.revision, row.generation))
    generations = [generation for _, generation in rising]
    if generations != [*range(row.generation + 1)] or any(
        one >= next_one for (one, _), (next_one, _) in pairwise(rising)
    ):
        yield Fault(row.session_id, None, "revisions_missing")


def _read(row: SessionRow, lines: Iterable[bytes]) -> tuple[int, bool]:
    """Bytes of the entries, and whether one of them is no entry or has another's id."""
    size_bytes = 0
    damaged = False
    ids: set[int] = set()
    for line in lines:
        size_bytes += len(line)
        try:
            entry = decode_entry(line)
            msgspec.json.decode(entry.item, type=msgspec.Raw)
        except (ValueError, msgspec.MsgspecError):
            damaged = True
        else:
            damaged = damaged or entry.entry_id in ids or not 0 < entry.entry_id < row.next_entry_id
            ids.add(entry.entry_id)
    return size_bytes, damaged
