"""An entry: one item of a history with its id and time, and its one written form.

The same line stands in the table of entries, in archive files and on the wire::

    {"id":17,"at":"2026-12-01T10:00:00.000Z","item":{…}}
    {"id":18,"at":"2026-12-01T10:00:00.000Z","reminder":{"generation":1,…},"item":{…}}

so that reading and sending a history is joining bytes. `item` comes last, and nothing before it can
contain the text `,"item":`, so the item's own bytes can be cut out without parsing.
"""

from datetime import UTC, datetime
from functools import lru_cache
from typing import Final

import msgspec

_ID: Final = b'{"id":'
_AT: Final = b',"at":"'
_REMINDER: Final = b',"reminder":'
_ITEM: Final = b',"item":'


class Reminder(msgspec.Struct, frozen=True, gc=False):
    """Where an item comes from that recapd made itself: said beside the item, never inside it."""

    generation: int
    operation_id: str
    archived_revision: int


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One item of a history.

    `entry_id` is unique in its session and never used again; `at_ms` is the time of the append in
    milliseconds since the epoch; `item` is the JSON text of the item as the client sent it, without
    line breaks.
    """

    entry_id: int
    at_ms: int
    item: bytes
    reminder: Reminder | None = None


_decode_reminder = msgspec.json.Decoder(Reminder).decode
_encode = msgspec.json.Encoder().encode


@lru_cache(maxsize=1024)  # a history has many entries of the same second
def _write_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19]


@lru_cache(maxsize=1024)
def _read_second(text: bytes) -> int:
    return int(datetime.fromisoformat(text.decode() + "Z").timestamp())


def encode_time(at_ms: int) -> str:
    """RFC 3339 in UTC with milliseconds, the one form in which recapd writes an instant.

    Of the years 1 to 9999, which is all that the form has room for.
    """
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
    id_end = line.index(b",")
    at_end = id_end + 32  # ,"at":"2026-12-01T10:00:00.000Z"
    item = line.index(_ITEM, at_end)
    if line[:6] != _ID or line[id_end : id_end + 7] != _AT or line[-1:] != b"}":
        raise ValueError("not an entry")
    at_ms = 1000 * _read_second(line[id_end + 7 : id_end + 26]) + int(line[at_end - 5 : at_end - 2])
    reminder = None
    if item != at_end:
        try:
            reminder = _decode_reminder(line[at_end + len(_REMINDER) : item])
        except msgspec.MsgspecError as error:
            raise ValueError("not an entry") from error
    return Entry(int(line[6:id_end]), at_ms, line[item + 8 : -1], reminder)
