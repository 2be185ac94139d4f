"""Media inside history items: where it stands, what it is, and a short label in its place.

A *media payload* is base64 that stands for an image or a file. One rule finds it, whatever the
format around it:

- a string value that is, as a whole, a `data:` URL with `;base64,`;
- anywhere in a string value, a run of more than 1,024 characters of the base64 alphabet
  (RFC 4648 §4 or §5) with upper case, lower case and digits among the first 1,024; a
  `data:…;base64,` before the run belongs to it.

So `image_generation_call.result`, `input_file.file_data`, Anthropic's `source.data`, images in the
outputs of tools and base64 in the middle of a text are all found, without a list of names. Prose,
code, paths, hex digests, a million equal letters and base64 wrapped in lines are text. An image
that is only named by its URL carries no payload: `describe_image` is for callers who know that a
string names an image.
"""

import binascii
import hashlib
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

MediaKind = Literal["image", "file"]

RUN_CHARS_MIN = 1024
"""A longer run is a payload; identifiers, digests and keys stay below it."""

_BLOCK_CHARS = 512  # half a run: wherever a run starts, it covers a whole block
_HEAD_CHARS_MAX = 160  # a media type (RFC 6838 §4.2: 127 characters) with a parameter
_URL_CHARS_MAX = 200  # of a plain URL in a label; signed URLs carry kilobytes of query
_SNIFF_CHARS = 64  # 48 bytes: every signature below lies in the first 12
_JPEG_SEGMENTS_MAX = 256  # segments before the frame header; cameras write about ten

_ALPHABET = string.ascii_letters + string.digits + "+/-_"
_BLOCK = re.compile(rf"[A-Za-z0-9+/_-]{{{_BLOCK_CHARS}}}")
_RUN = re.compile(r"[A-Za-z0-9+/_-]*+={0,2}")
_CLASSES = tuple(re.compile(pattern) for pattern in ("[A-Z]", "[a-z]", "[0-9]"))
_HEAD = r"data:([a-z0-9.+-]{1,64}/[a-z0-9.+-]{1,64})?(?:;[a-z0-9.+_-]+=[a-z0-9.+_-]+)*;base64,"
_HEAD_AT_START = re.compile(_HEAD, re.IGNORECASE)
_HEAD_AT_END = re.compile(_HEAD + r"\Z", re.IGNORECASE)
_DATA_URL = re.compile(_HEAD + r"[A-Za-z0-9+/_-]*+={0,2}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Media:
    """What is known of one image or file without showing it."""

    kind: MediaKind
    media_type: str = ""
    width_px: int = 0  # 0 where the format does not tell
    height_px: int = 0
    sha256: str = (
        ""  # first 12 hex digits; of the decoded bytes, or of the text where it does not decode
    )
    url: str = ""  # only for media that is named and not carried

    def label(self) -> str:
        """One line in brackets, such as `[image image/png 1280x720 sha256:0123456789ab]`."""
        size = f"{self.width_px}x{self.height_px}" if self.width_px and self.height_px else ""
        digest = f"sha256:{self.sha256}" if self.sha256 else ""
        words = (self.kind, self.media_type, size, digest, _shortened(self.url))
        return f"[{' '.join(word for word in words if word)}]"


def describe_media(value: str) -> Media | None:
    """What `value` is when it is one media payload as a whole; otherwise None."""
    spans = list(find_payloads(value))
    return _describe(value) if spans == [(0, len(value))] else None


def describe_image(url: str) -> Media:
    """What the value of an `image_url` is: a payload, or an image known only by its URL."""
    return describe_media(url) or Media("image", url=url)


def label_media(text: str) -> str:
    """`text` with the label of each media payload in its place."""
    pieces: list[str] = []
    copied = 0
    for start, end in find_payloads(text):
        pieces += (text[copied:start], _describe(text[start:end]).label())
        copied = end
    pieces.append(text[copied:])
    return "".join(pieces)


def find_payloads(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each media payload in `text`, in order and apart.

    The time is linear in the text, and small where there are none: of 512 characters a few are
    looked at.
    """
    if _DATA_URL.fullmatch(text):
        yield 0, len(text)
        return
    place = done = 0
    while place + _BLOCK_CHARS <= len(text):
        if not _BLOCK.match(text, place):
            place += _BLOCK_CHARS
            continue
        before = text[max(done, place - _BLOCK_CHARS) : place]
        start = place - len(before) + len(before.rstrip(_ALPHABET))
        run = _RUN.match(text, place)
        assert run is not None  # the pattern matches the empty string too
        place = run.end()
        if place - start > RUN_CHARS_MIN and _looks_encoded(text[start : start + RUN_CHARS_MIN]):
            head = _HEAD_AT_END.search(text, max(done, start - _HEAD_CHARS_MAX), start)
            yield (head.start() if head else start), place
        done = place


def payload_kind(payload: str) -> MediaKind:
    """Whether a media payload is an image: its media type says so, or its first bytes do."""
    declared, encoded = _split(payload)
    return "image" if _is_image(declared) or _sniff(_decode(encoded[:_SNIFF_CHARS])) else "file"


def _looks_encoded(run: str) -> bool:
    return all(pattern.search(run) for pattern in _CLASSES)


def _describe(payload: str) -> Media:
    declared, encoded = _split(payload)
    data = _decode(encoded)
    digest = hashlib.sha256(data or payload.encode()).hexdigest()[:12]
    found = _sniff(data)
    if found or _is_image(declared):
        width_px, height_px = _pixels(found, data)
        return Media("image", declared or found, width_px, height_px, digest)
    return Media("file", declared or "application/octet-stream", sha256=digest)


def _split(payload: str) -> tuple[str, str]:
    """The declared media type, empty where none is, and the base64 text."""
    head = _HEAD_AT_START.match(payload)
    if head is None:
        return "", payload
    return (head[1] or "").lower(), payload[head.end() :]


def _is_image(media_type: str) -> bool:
    return media_type.startswith("image/")


def _decode(encoded: str) -> bytes:
    """The bytes behind base64 text of either alphabet, padded or not; empty where it is none."""
    standard = encoded.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return binascii.a2b_base64(standard + "=" * (-len(standard) % 4))
    except binascii.Error:
        return b""


def _sniff(data: bytes) -> str:
    """An image's media type by its signature (WHATWG MIME Sniffing §6.1); empty if it has none."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "image/webp"
    return ""


def _pixels(media_type: str, data: bytes) -> tuple[int, int]:
    """Width and height as the image's header tells, in pixels; zeros where it does not."""
    match media_type:
        case "image/png":  # the IHDR chunk comes first
            return _big(data[16:20]), _big(data[20:24])
        case "image/gif":
            return _little(data[6:8]), _little(data[8:10])
        case "image/jpeg":
            return _jpeg_pixels(data)
        case "image/webp":
            return _webp_pixels(data)
        case _:
            return 0, 0


def _jpeg_pixels(data: bytes) -> tuple[int, int]:
    """Walk the segments up to the frame header (ITU-T T.81 §B.2.2)."""
    place = 2
    for _ in range(_JPEG_SEGMENTS_MAX):
        marker = data[place + 1 : place + 2]
        if data[place : place + 1] != b"\xff":
            break
        # SOF0 to SOF15, less DHT, JPG and DAC, which lie between them.
        if b"\xc0" <= marker <= b"\xcf" and marker not in (b"\xc4", b"\xc8", b"\xcc"):
            return _big(data[place + 7 : place + 9]), _big(data[place + 5 : place + 7])
        place += 2 + _big(data[place + 2 : place + 4])
    return 0, 0


def _webp_pixels(data: bytes) -> tuple[int, int]:
    """The three kinds of first chunk (RFC 9649 §2.5 to §2.7)."""
    if len(data) < 30:
        return 0, 0
    match data[12:16]:
        case b"VP8 ":
            return _little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF
        case b"VP8L":
            packed = _little(data[21:25])  # 14 bits of width - 1, then 14 of height - 1
            return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
        case b"VP8X":
            return _little(data[24:27]) + 1, _little(data[27:30]) + 1
        case _:
            return 0, 0


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _shortened(url: str) -> str:
    words = " ".join(url[: _URL_CHARS_MAX + 1].split())
    return words if len(words) <= _URL_CHARS_MAX else f"{words[:_URL_CHARS_MAX]}…"
