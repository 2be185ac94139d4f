"""Server-sent events: bytes in, events out, wherever the bytes are cut.

WHATWG HTML §9.2.6: a line ends with LF, CR or CR LF and with nothing else, so U+2028, U+0085 and
form feeds are data (`str.splitlines` would end a line there). What is pending at the end of the
stream is no event.
"""

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `name` is empty where the stream gave none; `data` is as it came, undecoded."""

    name: bytes
    data: bytes


class EventParser:
    """Takes a stream apart. It keeps what is pending: the caller bounds how much there is."""

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of the line that has no end yet
        self._first_line = True
        self._carriage_return = False  # the last byte was CR, so LF would belong to it
        self._name = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[Event]:
        """The events that end in `data`."""
        if not data:
            return []
        if self._carriage_return and data.startswith(b"\n"):
            data = data[1:]
        self._carriage_return = data.endswith(b"\r")
        lines = _LINE_END.split(data)
        self._line.append(lines[0])
        if len(lines) == 1:
            return []
        lines[0] = b"".join(self._line)
        self._line = [lines.pop()]
        if self._first_line:
            self._first_line = False
            lines[0] = lines[0].removeprefix(_BYTE_ORDER_MARK)
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")  # a comment has a field without a name
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        return None

    def _dispatch(self) -> Event | None:
        event = Event(self._name, b"\n".join(self._data)) if self._data else None
        self._name, self._data = b"", []
        return event
