"""Media payloads are found by one rule, and labelled by what their first bytes say."""

import base64
import hashlib
import json
import random
import struct
from pathlib import Path

import pytest

from recapd.daemon.compaction.media import (
    Media,
    describe_image,
    describe_media,
    find_payloads,
    label_media,
    payload_kind,
)

NOISE = random.Random(1).randbytes(4000)

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", 1280, 720) + NOISE
GIF = b"GIF89a" + struct.pack("<HH", 320, 200) + NOISE
JPEG = (
    b"\xff\xd8"
    + (b"\xff\xe1\x00\x10" + bytes(14)) * 3  # APP1 before the frame header, as cameras write it
    + b"\xff\xc2\x00\x11\x08"
    + struct.pack(">HH", 480, 640)
    + NOISE
)
WEBP_LOSSY = (
    b"RIFF\x00\x00\x00\x00WEBPVP8 " + bytes(7) + b"\x9d\x01\x2a" + struct.pack("<HH", 64, 48)
)
WEBP_LOSSLESS = (
    b"RIFF\x00\x00\x00\x00WEBPVP8L" + bytes(4) + b"\x2f" + struct.pack("<I", 63 | 47 << 14)
)
WEBP_EXTENDED = b"RIFF\x00\x00\x00\x00WEBPVP8X" + bytes(8) + b"\x3f\x00\x00\x2f\x00\x00"


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


@pytest.mark.parametrize(
    ("data", "media_type", "pixels"),
    [
        (PNG, "image/png", (1280, 720)),
        (GIF, "image/gif", (320, 200)),
        (JPEG, "image/jpeg", (640, 480)),
        (WEBP_LOSSY + NOISE, "image/webp", (64, 48)),
        (WEBP_LOSSLESS + NOISE, "image/webp", (64, 48)),
        (WEBP_EXTENDED + NOISE, "image/webp", (64, 48)),
    ],
)
def test_bare_base64_of_an_image_is_described_by_its_header(
    data: bytes, media_type: str, pixels: tuple[int, int]
) -> None:
    """`image_generation_call.result` holds nothing but base64."""
    expected = Media("image", media_type, *pixels, digest(data))
    assert describe_media(encoded(data)) == expected
    assert describe_media(base64.urlsafe_b64encode(data).decode().rstrip("=")) == expected


def test_a_label_shows_type_size_and_digest() -> None:
    media = describe_media(f"data:image/png;base64,{encoded(PNG)}")
    assert media is not None
    assert media.label() == f"[image image/png 1280x720 sha256:{digest(PNG)}]"


def test_a_file_is_labelled_by_the_type_that_its_url_declares() -> None:
    media = describe_media(f"data:application/pdf;charset=binary;base64,{encoded(NOISE)}")
    assert media is not None
    assert media.label() == f"[file application/pdf sha256:{digest(NOISE)}]"
    bare = describe_media(encoded(NOISE))
    assert bare is not None
    assert bare.label() == f"[file application/octet-stream sha256:{digest(NOISE)}]"


def test_a_declared_image_that_is_none_stays_an_image_without_a_size() -> None:
    media = describe_media(f"data:image/png;base64,{encoded(NOISE)}")
    assert media == Media("image", "image/png", sha256=digest(NOISE))


@pytest.mark.parametrize("length", range(30))
def test_a_truncated_header_never_fails(length: int) -> None:
    for data in (PNG, GIF, JPEG, WEBP_LOSSY, WEBP_LOSSLESS, WEBP_EXTENDED):
        media = describe_media(f"data:image/x;base64,{encoded(data[:length])}")
        assert media is not None
        assert media.kind == "image"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff\xe0\x00\x02" * 1_000,  # segments without end
        b"RIFF\x00\x00\x00\x00WEBPJUNK" + NOISE,
    ],
)
def test_an_image_whose_header_has_no_size_is_labelled_without_one(data: bytes) -> None:
    media = describe_media(f"data:image/x;base64,{encoded(data)}")
    assert media is not None
    assert media.label() == f"[image image/x sha256:{digest(data)}]"


def test_what_does_not_decode_has_the_digest_of_its_text() -> None:
    odd = "aB3d" * 300 + "x"  # one character more than base64 can have
    media = describe_media(odd)
    assert media is not None
    assert media.sha256 == digest(odd.encode())


def test_an_image_known_by_its_url_is_labelled_with_the_url() -> None:
    assert (
        describe_image("https://example.com/a.png").label() == "[image https://example.com/a.png]"
    )
    assert describe_image(f"data:image/png;base64,{encoded(PNG)}").width_px == 1280


def test_a_long_url_is_cut_and_stays_on_one_line() -> None:
    label = describe_image("https://example.com/a b\nc?" + "q" * 5000).label()
    assert label.startswith("[image https://example.com/a b c?q")
    assert label.endswith("q…]")
    assert len(label) < 220


def test_a_payload_in_the_middle_of_a_text_is_replaced_by_its_label() -> None:
    """Tools answer with JSON or Markdown that holds an image somewhere."""
    url = f"data:image/png;base64,{encoded(PNG)}"
    text = f'see ![shot]({url}) and {{"blob": "{encoded(NOISE)}"}} end'
    assert label_media(text) == (
        f"see ![shot]([image image/png 1280x720 sha256:{digest(PNG)}]) and "
        f'{{"blob": "[file application/octet-stream sha256:{digest(NOISE)}]"}} end'
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The quick brown fox jumps over 13 lazy dogs. " * 200,
        "a" * 1_000_000,
        " " * 100_000,
        "\n".join(encoded(NOISE)[i : i + 76] for i in range(0, 5000, 76)),
        hashlib.sha512(b"").hexdigest() * 100,
        "src/" * 500,
        "A1b" * 341,  # 1,023 characters
        "data:image/png;base64,iVBORw0KGgo= is how a PNG begins",
    ],
)
def test_text_is_not_taken_for_media(text: str) -> None:
    assert list(find_payloads(text)) == []
    assert describe_media(text) is None
    assert label_media(text) == text


def test_a_short_data_url_is_media_when_it_is_the_whole_value() -> None:
    url = f"data:image/png;base64,{encoded(PNG[:60])}"
    assert list(find_payloads(url)) == [(0, len(url))]
    assert payload_kind(url) == "image"


@pytest.mark.parametrize("length", [1025, 1026, 1500, 2048, 5000])
def test_a_run_is_found_whole_wherever_it_starts(length: int) -> None:
    """The search looks at one place in 512 only; no place must be missed."""
    run = encoded(NOISE)[:length]
    for offset in (*range(40), *range(490, 540), 1023, 1024, 1025):
        assert list(find_payloads("." * offset + run + "." + run)) == [
            (offset, offset + length),
            (offset + length + 1, offset + 2 * length + 1),
        ]


def test_neighbouring_payloads_are_found_apart() -> None:
    padded = encoded(NOISE[:1000])
    assert padded.endswith("==")
    first = len(padded)
    assert list(find_payloads(padded * 2)) == [(0, first), (first, 2 * first)]


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "text",
    [
        ("A1b" * 341 + ".") * 3000,
        "data:;" * 500_000,
        "data:a/a" + ";a=a" * 500_000,
        "data:image/png;base64," + "=" * 1_000_000,
    ],
)
def test_the_search_is_linear_in_hostile_text(text: str) -> None:
    assert sum(1 for _ in find_payloads(text)) <= 1


@pytest.mark.parametrize(
    ("recording", "label"),
    [
        ("16-responses-media-inputs/test_image_as_binary_content_input", "image/png 3008x2000"),
        (
            "16-responses-media-inputs/test_openai_responses_document_as_binary_content_input",
            "application/pdf",
        ),
        (
            "15-responses-builtin-tool-items/test_openai_responses_image_generation_jpeg",
            "image/jpeg 1536x1024",
        ),
        (
            "15-responses-builtin-tool-items/test_openai_responses_code_execution_return_image",
            "image/png 1580x974",
        ),
    ],
)
def test_the_media_of_recorded_items_are_found(corpus: Path, recording: str, label: str) -> None:
    text = (corpus / f"{recording}.items.json").read_text("utf-8")
    labelled = label_media(text)
    assert f"{label} sha256:" in labelled
    assert "base64," not in labelled
    assert len(json.loads(labelled)) == len(json.loads(text))
