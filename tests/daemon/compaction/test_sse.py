"""Server-sent events, WHATWG HTML §9.2.6 sentence by sentence."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapd.daemon.compaction.summarise.sse import Event, EventParser

STREAM = (
    "\ufeffevent: first\ndata: a\u2028b\u2029c\u0085d\x0ce\x1cf\r\ndata:no space\r\n\r\n"
    ": a comment\rdata\rdata:  two spaces\r\rid: 1\nretry: 5\n\ndata: \ud55c\U0001f642\n\n"
    "event: pending\ndata: never"
).encode()
EVENTS = [
    Event(b"first", "a\u2028b\u2029c\u0085d\x0ce\x1cf\nno space".encode()),
    Event(b"", b"\n two spaces"),
    Event(b"", "\ud55c\U0001f642".encode()),
]


def parsed(*pieces: bytes) -> list[Event]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_a_stream_in_one_piece() -> None:
    """B72: only LF, CR and CR LF end a line."""
    assert parsed(STREAM) == EVENTS


@pytest.mark.parametrize("place", range(len(STREAM)))
def test_a_stream_cut_in_two_at_any_byte(place: int) -> None:
    """B72."""
    assert parsed(STREAM[:place], STREAM[place:]) == EVENTS


def test_a_stream_byte_by_byte() -> None:
    assert parsed(*(bytes([byte]) for byte in STREAM)) == EVENTS


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"))),
    st.sampled_from(["\n", "\r", "\r\n"]),
    st.integers(1, 7),
)
def test_whatever_text_is_sent_comes_through(texts: list[str], end: str, size: int) -> None:
    stream = "".join(f"data: {text}{end}{end}" for text in texts).encode()
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [event.data.decode() for event in parsed(*pieces)] == texts
