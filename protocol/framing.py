"""Bytes in, frames out, and back: no sockets, no clock (PROTOCOL.md §1).

Two framings share the socket. *Lines* is newline-delimited JSON: one frame ends with LF.
*Content-Length* is the base protocol of the Language Server Protocol: a header block, then a body
counted in bytes.

After a fault the place where the next frame starts is not known any more, so a framer never
resynchronises: the frames before the fault count, everything behind it is dropped.
"""

from typing import Literal

from recapd.protocol.errors import FrameTooLarge, ParseError, RpcError

Framing = Literal["lines", "content-length"]

FRAME_BYTES_MAX = 16 * 1024 * 1024  # the default limit, announced by protocol.initialize

_HEADER_BYTES_MAX = 8 * 1024
# A real header block has about 30 bytes, with a Content-Type about 80.

_LENGTH_DIGITS_MAX = 18
# More digits cannot be a length; int() refuses from 4301 digits on.

_BLANKS = b" \t\r"


class BadHeader(ParseError):
    """The header block of a Content-Length frame is malformed; the connection ends."""

    hint = "A header block is `Content-Length: <digits>`, CR LF, CR LF."


class Framer:
    """The framing of one connection, both ways.

    A server leaves `framing` open: the first byte received decides (`C` is the start of a
    `Content-Length` header, and of no JSON text). Until then it would answer in lines.

    `fault` is None while the incoming stream is good. Once it is set, `receive` gives nothing more;
    `encode` still works, so that the fault can be answered before the stream is closed.
    """

    def __init__(
        self, framing: Framing | None = None, *, frame_bytes_max: int = FRAME_BYTES_MAX
    ) -> None:
        self.framing = framing
        self.fault: RpcError | None = None
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()  # of the unfinished frame, or of the unfinished header line
        self._length: int | None = None  # of the body, once its header line was seen
        self._in_header = True
        self._header_bytes = 0  # in the finished lines of the unfinished header block

    @property
    def pending(self) -> bool:
        """Whether an unfinished frame is held: at the end of the stream, it was cut off there."""
        return self._header_bytes > 0 or (bool(self._buffer) and not self._buffer.isspace())

    def receive(self, data: bytes) -> list[bytes]:
        """Take what was read from the stream and return the frames it completes, in order.

        Blank lines are no frames. Work is linear in the bytes received, however they are cut (an
        unfinished header line is searched again, but it is short); at most `frame_bytes_max` and
        one chunk of `data` are held. Look at `fault` afterwards.
        """
        if self.fault is not None or not data:
            return []
        if self.framing is None:
            self.framing = "content-length" if data.startswith(b"C") else "lines"
        return self._lines(data) if self.framing == "lines" else self._bodies(data)

    def encode(self, frame: bytes) -> bytes:
        """Return the bytes to send for one frame of JSON text.

        Raises FrameTooLarge, before anything is sent, for what the peer would have to refuse.
        """
        if len(frame) > self._frame_bytes_max:
            raise FrameTooLarge(limit_bytes=self._frame_bytes_max)
        if self.framing == "content-length":
            return b"Content-Length: %d\r\n\r\n%b" % (len(frame), frame)
        # Items keep the bytes of their client, who may have sent them pretty-printed in the other
        # framing. In JSON text a raw LF can only be white space, never part of a string.
        return frame.replace(b"\n", b" ") + b"\n"

    def _lines(self, data: bytes) -> list[bytes]:
        # On 0x0A only: bytes.splitlines would split on CR, str.splitlines on U+2028 as well.
        # Looking first is ten times faster than splitting, for the middle of a long frame.
        lines = data.split(b"\n") if b"\n" in data else [data]
        rest = lines.pop()
        if lines and self._buffer:
            self._buffer += lines[0]
            lines[0] = bytes(self._buffer)
            self._buffer = bytearray()
        frames: list[bytes] = []
        for line in lines:
            if len(line) > self._frame_bytes_max:
                return self._fail(FrameTooLarge(limit_bytes=self._frame_bytes_max), frames)
            if frame := line.strip(_BLANKS):
                frames.append(frame)
        self._buffer += rest
        if len(self._buffer) > self._frame_bytes_max:
            return self._fail(FrameTooLarge(limit_bytes=self._frame_bytes_max), frames)
        return frames

    def _bodies(self, data: bytes) -> list[bytes]:
        frames: list[bytes] = []
        self._buffer += data
        start = 0  # of what is not consumed yet
        while True:
            if self._in_header:
                end = self._buffer.find(b"\n", start) + 1
                line_bytes = (end or len(self._buffer)) - start
                if self._header_bytes + line_bytes > _HEADER_BYTES_MAX:
                    return self._fail(BadHeader(), frames)
                if not end:
                    break
                self._header_bytes += line_bytes
                if fault := self._header_line(bytes(self._buffer[start:end])):
                    return self._fail(fault, frames)
                start = end
            else:
                assert self._length is not None  # _header_line leaves the header only with it
                end = start + self._length
                if end > len(self._buffer):
                    break
                with memoryview(self._buffer) as view:
                    frames.append(bytes(view[start:end]))
                self._length, self._in_header, self._header_bytes = None, True, 0
                start = end
        del self._buffer[:start]
        return frames

    def _header_line(self, line: bytes) -> RpcError | None:
        """Take one line of a header block with its line end (LSP 3.17, "Header Part")."""
        if not line.endswith(b"\r\n"):
            return BadHeader()
        if line == b"\r\n":
            self._in_header = False
            return BadHeader() if self._length is None else None
        name, colon, value = line.partition(b":")
        if not name or not colon:
            return BadHeader()
        if name.lower() != b"content-length":
            return None
        digits = value[:-2].strip(b" \t")
        if not digits.isdigit() or len(digits) > _LENGTH_DIGITS_MAX or self._length is not None:
            return BadHeader()
        self._length = int(digits)
        if self._length > self._frame_bytes_max:
            return FrameTooLarge(limit_bytes=self._frame_bytes_max)
        return None

    def _fail(self, fault: RpcError, frames: list[bytes]) -> list[bytes]:
        self.fault = fault
        self._buffer, self._header_bytes = bytearray(), 0
        return frames
