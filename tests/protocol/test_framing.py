"""Bytes in, frames out, however the bytes are cut: PROTOCOL.md §1."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapd.protocol.errors import FrameTooLarge, RpcError
from recapd.protocol.framing import BadHeader, Framer, Framing

FRAMINGS: list[Framing] = ["lines", "content-length"]

TEXTS = [
    "汉字と仮名、한글",
    "👩\u200d👩\u200d👧 \U0001f600",
    "Content-Length: 5\r\n\r\nhello",
    '{"jsonrpc":"2.0","id":1,"method":"protocol.ping"}\n',
    "a\u2028b\u2029c\x85d\x0be",
    "C",
    "",
]
FRAMES = [json.dumps(text, ensure_ascii=False).encode() for text in TEXTS]


def stream_of(frames: list[bytes], framing: Framing) -> bytes:
    sender = Framer(framing)
    return b"".join(map(sender.encode, frames))


def received(
    chunks: list[bytes], *, framing: Framing | None = None, frame_bytes_max: int = 1 << 24
) -> tuple[list[bytes], type[RpcError] | None]:
    """All frames that come out, and the kind of fault."""
    framer = Framer(framing, frame_bytes_max=frame_bytes_max)
    frames = [frame for chunk in chunks for frame in framer.receive(chunk)]
    return frames, type(framer.fault) if framer.fault else None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted(place % (len(data) + 1) for place in places)
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


@pytest.mark.parametrize("framing", FRAMINGS)
def test_frames_come_out_equal_for_every_place_of_a_cut(framing: Framing) -> None:
    """openlawlibrary/pygls#604: short reads were taken for whole messages."""
    stream = stream_of(FRAMES, framing)
    for place in range(len(stream) + 1):
        assert received([stream[:place], stream[place:]]) == (FRAMES, None)


@pytest.mark.parametrize("framing", FRAMINGS)
def test_frames_come_out_equal_one_byte_at_a_time(framing: Framing) -> None:
    """openlawlibrary/pygls#604."""
    stream = stream_of(FRAMES, framing)
    assert received([bytes([byte]) for byte in stream]) == (FRAMES, None)


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_frame_is_delivered_with_its_last_byte(framing: Framing) -> None:
    """A client that waits for the answer sends nothing more."""
    stream = stream_of([b'"a"'], framing)
    framer = Framer()
    assert framer.receive(stream[:-1]) == []
    assert framer.receive(stream[-1:]) == [b'"a"']


@given(
    st.lists(st.text().map(lambda text: json.dumps(text, ensure_ascii=False).encode())),
    st.sampled_from(FRAMINGS),
    st.lists(st.integers(min_value=0)),
)
def test_any_frames_survive_any_cuts(
    frames: list[bytes], framing: Framing, places: list[int]
) -> None:
    """PROTOCOL.md §1: the stream has no other structure than its frames."""
    assert received(cut(stream_of(frames, framing), places)) == (frames, None)


@given(
    st.one_of(
        st.binary(),
        st.lists(
            st.sampled_from([b"{}", b"\n", b"\r\n", b"Content-Length: ", b"2", b"9", b":", b" "])
        ).map(b"".join),
    ),
    st.sampled_from([None, *FRAMINGS]),
    st.lists(st.integers(min_value=0)),
)
def test_any_bytes_mean_the_same_however_they_are_cut(
    data: bytes, framing: Framing | None, places: list[int]
) -> None:
    """PROTOCOL.md §1: any bytes on the socket, never a crash."""
    whole = received([data], framing=framing, frame_bytes_max=8)
    assert received(cut(data, places), framing=framing, frame_bytes_max=8) == whole


def test_lines_are_split_on_line_feed_alone() -> None:
    """PROTOCOL.md §1: U+2028 and friends are data."""
    line = '"a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"'.encode()
    assert received([line + b"\n" + line + b"\n"]) == ([line, line], None)


def test_a_carriage_return_before_the_line_feed_is_tolerated() -> None:
    """PROTOCOL.md §1."""
    assert received([b'{"a":\r1}\r\n[]\r', b"\n"]) == ([b'{"a":\r1}', b"[]"], None)


def test_blank_lines_are_ignored() -> None:
    """PROTOCOL.md §1; modelcontextprotocol/servers#4206."""
    assert received([b"\n\r\n   \n\t\r\n{}\n\n"]) == ([b"{}"], None)


@pytest.mark.parametrize(
    ("first", "answer"),
    [
        (b"{}\n", b"[]\n"),
        (b"\n", b"[]\n"),
        (b"c", b"[]\n"),
        (b"C", b"Content-Length: 2\r\n\r\n[]"),
    ],
)
def test_the_first_byte_decides_how_the_server_answers(first: bytes, answer: bytes) -> None:
    """PROTOCOL.md §1: `C` means Content-Length framing both ways."""
    framer = Framer()
    framer.receive(first)
    assert framer.encode(b"[]") == answer


def test_a_server_that_was_sent_nothing_answers_in_lines() -> None:
    """A refusal at accept comes before the first byte."""
    framer = Framer()
    assert framer.receive(b"") == []
    assert framer.encode(b"{}") == b"{}\n"


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_client_keeps_the_framing_that_it_chose(framing: Framing) -> None:
    """PROTOCOL.md §1: the same framing both ways."""
    server, client = Framer(), Framer(framing)
    assert server.receive(client.encode(b"[1]")) == [b"[1]"]
    assert client.receive(server.encode(b"[2]")) == [b"[2]"]


def test_a_frame_with_line_feeds_is_sent_as_one_line() -> None:
    """PROTOCOL.md §1: items keep their bytes, and the other framing lets them have lines."""
    frame = json.dumps({"item": {"text": "a\nb"}}, indent=2).encode()
    (line,) = Framer("lines").receive(Framer("lines").encode(frame))
    assert json.loads(line) == json.loads(frame)
    assert Framer("content-length").receive(Framer("content-length").encode(frame)) == [frame]


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("size_bytes", [65_535, 65_536, 65_537, 131_072, 5_000_000])
def test_frames_of_any_permitted_length_pass(size_bytes: int, framing: Framing) -> None:
    """agentclientprotocol/python-sdk#27: lines over 64 KiB ended the connection."""
    frames = [b"[1]", b'"%b"' % (b"x" * (size_bytes - 2)), b"[2]"]
    stream = stream_of(frames, framing)
    chunks = [stream[start : start + 65_536] for start in range(0, len(stream), 65_536)]
    assert received(chunks) == (frames, None)


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_mebibyte_one_byte_at_a_time_takes_no_quadratic_work(framing: Framing) -> None:
    """openlawlibrary/pygls#604: with a copy for each byte this would run into the time limit."""
    frame = b'"%b"' % (b"x" * (1 << 20))
    framer = Framer(framing)
    frames: list[bytes] = []
    for byte in stream_of([frame], framing):
        frames += framer.receive(b"%c" % byte)
    assert frames == [frame]


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_frame_at_the_limit_passes_and_one_above_it_is_a_fault(framing: Framing) -> None:
    """PROTOCOL.md §1, limits; the frames before it are delivered all the same."""
    good, bad = [b"[1]", b'"%b"' % (b"x" * 98)], b'"%b"' % (b"x" * 99)
    stream = stream_of([*good, bad, b"[2]"], framing)
    for place in range(len(stream) + 1):
        chunks = [stream[:place], stream[place:]]
        assert received(chunks, frame_bytes_max=100) == (good, FrameTooLarge)
        assert received(chunks, frame_bytes_max=101) == ([*good, bad, b"[2]"], None)


def test_an_endless_line_is_not_gathered() -> None:
    """agentclientprotocol/python-sdk#27: the fault comes with the first chunk too much."""
    framer = Framer(frame_bytes_max=1 << 20)
    chunk = b"x" * (1 << 16)
    accepted = 0
    while framer.fault is None:
        framer.receive(chunk)
        accepted += 1
    assert accepted == 17
    assert not framer.pending


def test_an_announced_length_above_the_limit_is_refused_before_the_body_comes() -> None:
    """agentclientprotocol/python-sdk#27."""
    chunks = [b"Content-Length: 101\r\n"]
    assert received(chunks, frame_bytes_max=100) == ([], FrameTooLarge)


@pytest.mark.parametrize("framing", FRAMINGS)
def test_after_a_fault_nothing_is_received_but_the_fault_can_be_answered(framing: Framing) -> None:
    """PROTOCOL.md §1: the stream is closed after the answer, never resynchronised."""
    framer = Framer(framing, frame_bytes_max=10)
    framer.receive(stream_of([b"x" * 11], framing))
    fault = framer.fault
    assert isinstance(fault, FrameTooLarge)
    assert fault.data == {"limit_bytes": 10}
    assert framer.receive(stream_of([b"{}"], framing)) == []
    assert framer.fault is fault
    assert Framer(framing).receive(framer.encode(b"[]")) == [b"[]"]


@pytest.mark.parametrize("framing", FRAMINGS)
def test_what_the_peer_would_refuse_is_not_sent(framing: Framing) -> None:
    """PROTOCOL.md §1: 16 MiB each way."""
    framer = Framer(framing, frame_bytes_max=10)
    assert framer.encode(b"x" * 10)
    with pytest.raises(FrameTooLarge):
        framer.encode(b"x" * 11)


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: 2\r\n\r\n",
        b"CONTENT-LENGTH:2\r\n\r\n",
        b"Content-length:\t 2 \r\n\r\n",
        b"Content-Type: application/vscode-jsonrpc; charset=utf-8\r\nContent-Length: 2\r\n\r\n",
        b"Content-Length: 2\r\nX-Other:\r\n\r\n",
        b"Content-Length: 000000002\r\n\r\n",
    ],
)
def test_well_formed_headers_are_understood(header: bytes) -> None:
    """LSP 3.17, "Header Part": names are those of HTTP, in any case; other fields are optional."""
    assert received([header + b"{}" + header + b"[]"]) == ([b"{}", b"[]"], None)


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: \r\n\r\n",
        b"Content-Length: -2\r\n\r\n",
        b"Content-Length: +2\r\n\r\n",
        b"Content-Length: 2.0\r\n\r\n",
        b"Content-Length: 0x2\r\n\r\n",
        b"Content-Length: 1_0\r\n\r\n",
        b"Content-Length: two\r\n\r\n",
        b"Content-Length: 2 2\r\n\r\n",
        "Content-Length: ٢\r\n\r\n".encode(),
        b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n",
        b"Content-Length : 2\r\n\r\n",
        b"Content-Length 2\r\n\r\n",
        b"Content-Length: 2\n\n",
        b"Content-Length: 2\r\nX: y\n\r\n",
        b"Content-Type: x\r\n\r\n",
        b"Content-Length: 2\r\n: x\r\n\r\n",
        b"\r\n",
        b"{}\n",
        b"CONNECT / HTTP/1.1\r\n\r\n",
        b"C" * 8193,
        b"C: x\r\n" * 1400,
    ],
)
def test_a_malformed_header_is_a_fault_behind_the_frames_before_it(header: bytes) -> None:
    """LSP 3.17, "Header Part"; PROTOCOL.md §1. A request smuggled past one reader is none here."""
    stream = b"Content-Length: 2\r\n\r\n{}" + header + b"[]Content-Length: 2\r\n\r\n[]"
    for place in {0, 1, 23, 24, 25, 30, len(stream) - 30}:
        assert received([stream[:place], stream[place:]]) == ([b"{}"], BadHeader)


def test_a_malformed_header_is_answered_as_a_parse_error() -> None:
    """PROTOCOL.md §6: what cannot be read has no id and no better reason."""
    framer = Framer("content-length")
    framer.receive(b"{}\n")
    assert framer.fault is not None
    assert framer.fault.to_wire()["data"]["reason"] == "parse_error"


def test_an_empty_body_is_a_frame() -> None:
    """JSON-RPC 2.0, section 5.1: it is no JSON and is answered as such."""
    assert received([b"Content-Length: 0\r\n\r\nContent-Length: 2\r\n\r\n{}"]) == (
        [b"", b"{}"],
        None,
    )


@pytest.mark.parametrize(
    ("data", "pending"),
    [
        (b"", False),
        (b"{}\n", False),
        (b"{}\n  \r", False),
        (b"{}\n{", True),
        (b"C", True),
        (b"Content-Length: 2\r\n", True),
        (b"Content-Length: 2\r\n\r\n", True),
        (b"Content-Length: 2\r\n\r\n{", True),
        (b"Content-Length: 2\r\n\r\n{}", False),
        (b"Content-Length: 2\r\n\r\n{}Cont", True),
    ],
)
def test_a_frame_that_was_cut_off_at_the_end_is_seen(data: bytes, pending: bool) -> None:
    """modelcontextprotocol/servers#4206: half an object, then close, is harmless."""
    framer = Framer()
    framer.receive(data)
    assert framer.pending is pending


def test_thousands_of_small_frames_in_one_chunk_come_out_in_order() -> None:
    """PROTOCOL.md §1: requests are executed in arrival order."""
    frames = [b"%d" % number for number in range(10_000)]
    for framing in FRAMINGS:
        assert received([stream_of(frames, framing)]) == (frames, None)
