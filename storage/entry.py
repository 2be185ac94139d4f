"""An entry: one item of a history with its id and time, and its one written form.

The same line stands in the table of entries, in archive files and on the wire::

    {"id":17,"at":"2026-12-01T10:00:00.000Z","item":{…}}
    {"id":18,"at":"2026-12-01T10:00:00.000Z","reminder":{"generation":1,…},"item":{…}}

so that reading and sending a history is joining bytes. `item` comes last, and nothing before it can contain the
text `"item":`, so the item's own bytes can be cut out without parsing.
"""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

import msgspec

_REMINDER: Final = b',"reminder":'
_ITEM: Final = b',"item":'


class Reminder(msgspec.Struct, frozen=True):
    """Where an item that recapd made itself comes from: provenance beside the item, never inside it."""

    generation: int
    operation_id: str
    archived_revision: int


class Entry(msgspec.Struct, frozen=True):
    """One item of a history.

    `entry_id` is unique in its session and never used again; `at_ms` is the time of the append in milliseconds
    since the epoch; `item` is the JSON text of the item as the client sent it, without line breaks.
    """

    entry_id: int
    at_ms: int
    item: bytes
    reminder: Reminder | None = None


_decode_reminder = msgspec.json.Decoder(Reminder).decode
_encode = msgspec.json.Encoder().encode


@lru_cache(maxsize=1024)  # a history has many entries of the same second
def _write_second(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"


@lru_cache(maxsize=1024)
def _read_second(text: bytes) -> int:
    return int(datetime.fromisoformat(text.decode() + "Z").timestamp())


def encode_time(at_ms: int) -> str:
    """RFC 3339 in UTC with milliseconds, the one form in which recapd writes an instant."""
    seconds, milliseconds = divmod(at_ms, 1000)
    return f"{_write_second(seconds)}.{milliseconds:03d}Z"


def encode_entry(entry: Entry) -> bytes:
    """The entry's line, without the line end."""
    head = b'{"id":%d,"at":"%b"' % (entry.entry_id, encode_time(entry.at_ms).encode())
    if entry.reminder is not None:
        head += _REMINDER + _encode(entry.reminder)
    return b"%b%b%b}" % (head, _ITEM, entry.item)


def item_of(line: bytes) -> bytes:
    """The item's bytes within an entry's line."""
    return line[line.index(_ITEM) + len(_ITEM) : -1]


def decode_entry(line: bytes) -> Entry:
    """The entry that `line` says.

    Raises:
        ValueError: the line is not an entry's line.
    """
    comma = line.index(b",")
    item = line.index(_ITEM)
    head = line[comma:item]
    if not line.startswith(b'{"id":') or not head.startswith(b',"at":"') or not line.endswith(b"}"):
        raise ValueError("not an entry")
    at_ms = 1000 * _read_second(head[7:26]) + int(head[27:30])
    provenance = head[32:]
    reminder = _decode_reminder(provenance[len(_REMINDER) :]) if provenance else None
    return Entry(int(line[6:comma]), at_ms, line[item + len(_ITEM) : -1], reminder)
