"""Exports: histories as text, pulled in chunks.

An export is a row of pieces: for each history a head, one piece for each entry, and a foot. A chunk
is cut out of that row by bytes, so that any history goes through in pieces of any size, and a
cursor is a place in it. The histories of an export are those that were there at its first chunk.
"""

import re
from dataclasses import dataclass
from typing import Final, get_args

import msgspec

from recapd.daemon import cursors
from recapd.daemon.compaction.transcript import message_text, render
from recapd.daemon.config import ENVELOPE_BYTES
from recapd.daemon.cursors import ExportPosition
from recapd.daemon.projection import Projection
from recapd.daemon.wire import wire_revision
from recapd.protocol.errors import CursorInvalid, UnsupportedFormat
from recapd.protocol.items import item_facts
from recapd.protocol.messages import (
    ExportParams,
    ExportResult,
    Format,
    Manifest,
    ManifestRevision,
    Redaction,
)
from recapd.storage.entry import Entry, encode_time, item_of
from recapd.storage.errors import RevisionUnknown
from recapd.storage.store import Revision, Store

_CHUNK_BYTES: Final = 1 << 20
_ESCAPED_LENGTH_MAX: Final = 6  # of one byte in a JSON string: \u0000
_PAGE_ENTRIES: Final = 500

_FORMATS: Final[dict[str, Format]] = {form: form for form in get_args(Format)}

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _History:
    """One history of the export; `archived` is None for the one that was present when it began."""

    revision: int
    generation: int
    entries: int
    archived: Revision | None


async def export_chunk(
    store: Store, params: ExportParams, *, full: bool, frame_bytes_max: int
) -> ExportResult:
    """One chunk, as `params` ask for it, within a frame however it must be escaped.

    `full`: the caller may see all of it.

    Raises UnsupportedFormat, CursorInvalid, and what `Store.page` raises.
    """
    form = _FORMATS.get(params.format)
    if form is None:
        raise UnsupportedFormat(supported=list(_FORMATS))
    position = cursors.decode(params.cursor, ExportPosition)
    session = await store.session(params.session_id)
    if position is None:
        position = ExportPosition(
            params.session_id,
            session.created_at_ms,
            form,
            params.redact,
            full,
            params.revision,
            session.revision,
            session.generation,
            session.entries,
            *(0, 0, 0, 0),
            {},
        )
    elif (
        position.session_id,
        position.created_at_ms,
        position.format,
        position.redact,
        position.full,
        position.scope,
    ) != (
        params.session_id,
        session.created_at_ms,
        params.format,
        params.redact,
        full,
        params.revision,
    ):
        raise CursorInvalid
    histories = await _histories(store, position)
    bytes_max = (frame_bytes_max - ENVELOPE_BYTES) // _ESCAPED_LENGTH_MAX
    chunk = _Chunk(store, histories, position, min(params.max_bytes or _CHUNK_BYTES, bytes_max))
    await chunk.fill()
    return chunk.result()


async def _histories(store: Store, position: ExportPosition) -> list[_History]:
    """Oldest first."""
    present = _History(position.revision, position.generation, position.total, None)
    if position.scope == "current" or position.scope == position.revision:
        return [present]
    archived = [
        _History(one.revision, one.generation, one.entries, one)
        for one in reversed(await store.revisions(position.session_id))
        if one.generation < position.generation
    ]
    if position.scope == "all":
        return [*archived, present]
    wanted = [history for history in archived if history.revision == position.scope]
    if not wanted:
        raise RevisionUnknown(position.scope)
    return wanted


class _Chunk:
    """A chunk while it is being filled."""

    def __init__(
        self,
        store: Store,
        histories: list[_History],
        position: ExportPosition,
        bytes_max: int,
    ) -> None:
        self._store = store
        self._histories = histories
        self._start = position
        self._history: int = position.history
        self._piece: int = position.piece
        self._offset: int = position.offset
        self._room = bytes_max
        self._parts: list[bytes] = []
        self._projection = Projection(
            full=position.full, redact=position.redact == "policy", counts=position.counts
        )
        self._format: Format = position.format

    async def fill(self) -> None:
        while self._room > 0 and self._history < len(self._histories):
            history = self._histories[self._history]
            if self._piece == 0:
                self._put(self._head(history))
            elif self._piece <= history.entries:
                await self._put_entries(history)
            elif self._piece == history.entries + 1:
                if self._put(self._foot(history)):
                    self._history += 1
                    self._piece = 0
            else:
                raise CursorInvalid

    def result(self) -> ExportResult:
        chunk = b"".join(self._parts)
        sent = self._start.bytes + len(chunk)
        if self._history < len(self._histories):
            following = msgspec.structs.replace(
                self._start,
                history=self._history,
                piece=self._piece,
                offset=self._offset,
                bytes=sent,
                counts=dict(self._projection.counts),
            )
            return ExportResult(chunk.decode(), cursors.encode(following), False)
        manifest = Manifest(
            self._start.session_id,
            self._format,
            [
                ManifestRevision(one.revision, one.archived is None, one.entries)
                for one in self._histories
            ],
            sent,
            Redaction(self._start.redact, dict(self._projection.counts)),
        )
        return ExportResult(chunk.decode(), None, True, manifest)

    async def _put_entries(self, history: _History) -> None:
        page = await self._store.page(
            self._start.session_id,
            generation=history.generation,
            start=self._piece - 1,
            total=history.entries,
            limit=_PAGE_ENTRIES,
            bytes_max=self._room,
        )
        if not page.entries:
            raise CursorInvalid  # the history has fewer than the cursor says
        for line in page.entries:
            if self._room <= 0:
                return
            counts = self._projection.counts.copy()
            if not self._put(self._entry(line, last=self._piece == history.entries)):
                self._projection.counts = (
                    counts  # the rest of this piece is made again by the next chunk
                )

    def _put(self, piece: bytes) -> bool:
        """Take as much of the piece as there is room for; whether that was all the rest of it."""
        rest = piece[self._offset :]
        taken = rest[: self._room]
        if len(taken) < len(rest):
            # Never within a character: a chunk is text. One character at least, for a chunk to end.
            end = len(taken)
            while end > 0 and rest[end] & 0xC0 == 0x80:
                end -= 1
            while end == 0 or (end < len(rest) and rest[end] & 0xC0 == 0x80):
                end += 1
            taken = rest[:end]
        self._parts.append(taken)
        self._room -= len(taken)
        if len(taken) < len(rest):
            self._offset += len(taken)
            self._room = 0
            return False
        self._offset = 0
        self._piece += 1
        return True

    # The pieces.

    def _head(self, history: _History) -> bytes:
        match self._format:
            case "jsonl":
                return b""
            case "json":
                # Only what stays: a chunk may end within, and the rest is made by another request.
                opening = b""
                if self._history == 0:
                    opening = b'{"session_id":%b,"histories":[' % _encode(self._start.session_id)
                told: dict[str, object] = {"revision": history.revision}
                if history.archived is not None:
                    told["archive"] = wire_revision(history.archived)
                return b'%b%b,"entries":[' % (opening, _encode(told)[:-1])
            case "markdown":
                kind = "present" if history.archived is None else "archived"
                return (
                    f"# {self._start.session_id}\n\n"
                    f"Revision {history.revision} ({kind}), {history.entries} entries.\n\n"
                ).encode()

    def _foot(self, history: _History) -> bytes:
        last = self._history == len(self._histories) - 1
        if self._format == "json":
            return b"]}]}" if last else b"]},"
        return b""

    def _entry(self, line: bytes, *, last: bool) -> bytes:
        match self._format:
            case "jsonl":
                if self._projection.changes_nothing:
                    return item_of(line) + b"\n"
                return self._projection.entry(line).item + b"\n"
            case "json":
                line = self._projection.line(line)
                return line if last else line + b","
            case "markdown":
                return self._markdown(self._projection.entry(line))

    def _markdown(self, entry: Entry) -> bytes:
        """One entry: a mark that a parser can trust, for it says how long the text behind it is.

        A message is given as it was written; whatever else, as a transcript within a fence.
        """
        item = entry.item
        message = message_text(item)
        if message is not None:
            title, body = message
        else:
            title, body = item_facts(item).type or "item", render(item)
            fence = "`" * max(3, _longest_run(body) + 1)
            body = f"{fence}text\n{body}\n{fence}"
        length_bytes = len(body.encode())
        mark = f"<!-- entry {entry.entry_id}, {encode_time(entry.at_ms)}, {length_bytes} bytes -->"
        return f"## {' '.join(title.split())}\n{mark}\n{body}\n\n".encode()


def _longest_run(text: str) -> int:
    """Of backticks: a fence must be longer than any within (CommonMark 0.31, §4.5)."""
    return max(map(len, re.findall("`+", text)), default=0)
