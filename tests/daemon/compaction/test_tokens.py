"""Token figures: media by flat numbers, text by the table, and always an answer."""

import base64
import builtins
import hashlib
import json
import logging
import lzma
import random
import threading
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest
import tiktoken

from recapd.daemon.compaction.tokens import (
    CHUNK_CHARS_MAX,
    DECODED_BYTES_MIN,
    FILE_TOKENS,
    IMAGE_TOKENS,
    TABLE_FILE,
    TokenCount,
    TokenTable,
    count_item_tokens,
    count_tokens,
    count_tokens_of,
    estimate_tokens,
    read_ranks,
)

PUBLISHED_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


def as_item(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


SAMPLES = (
    "I'LL say: he's here, they'VE gone",
    "camelCase HTTPServer naïve Straße ǅungla",
    "12345678 1.5e-7 ½ ४२",
    "    if x:\r\n\t\treturn  //path/to\n\n\n  end   ",
    "日本語とहिन्दी, العربية 👩\u200d👩\u200d👧 e\u0301",
)


def user_message(*parts: Mapping[str, object]) -> bytes:
    return as_item({"type": "message", "role": "user", "content": parts})


def noise(count: int) -> str:
    """Base64 of `count` random bytes."""
    return base64.b64encode(random.Random(count).randbytes(count)).decode()


def png(count: int) -> str:
    """A `data:` URL of a PNG with `count` bytes after its header."""
    header = base64.b64encode(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(8)).decode()
    return f"data:image/png;base64,{header}{noise(count)}"


def image_part(url: str) -> dict[str, object]:
    return {"type": "input_image", "detail": "auto", "image_url": url}


# --- the table


def test_the_shipped_table_holds_the_published_ranks() -> None:
    """The published file, written again from ours, has the digest that tiktoken asks of it."""
    ranks = read_ranks(lzma.decompress(shipped_table()))
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    assert hashlib.sha256(b"".join(lines)).hexdigest() == PUBLISHED_SHA256


def test_the_encoding_is_the_one_that_tiktoken_defines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pattern, special tokens and name are copied from a function that would fetch the table."""

    def shipped_ranks(*_: object, **__: object) -> dict[bytes, int]:
        return read_ranks(lzma.decompress(shipped_table()))

    monkeypatch.setattr("tiktoken_ext.openai_public.load_tiktoken_bpe", shipped_ranks)
    defined = tiktoken.get_encoding("o200k_base")
    ours = TokenTable().encoding()
    assert ours is not None
    assert ours.name == defined.name
    assert ours.n_vocab == defined.n_vocab
    assert ours.special_tokens_set == defined.special_tokens_set
    for text in SAMPLES:
        assert ours.encode(text) == defined.encode(text)


def shipped_table() -> bytes:
    return resources.files("recapd.daemon.compaction").joinpath(TABLE_FILE).read_bytes()


def flipped(packed: bytes) -> bytes:
    middle = len(packed) // 2
    return packed[:middle] + bytes((packed[middle] ^ 1,)) + packed[middle + 1 :]


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"not a table",
        shipped_table()[:-1],
        shipped_table()[:400_000],
        flipped(shipped_table()),
        lzma.compress(flipped(lzma.decompress(shipped_table())), preset=0),
        lzma.compress(b"", preset=0),
    ],
    ids=["empty", "other", "one byte short", "half", "bit flipped", "token changed", "no tokens"],
)
def test_a_damaged_table_is_noticed_and_bytes_are_counted(
    packed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """B71: a cut-off file gave wrong counts."""
    table = TokenTable(lambda: packed, clock=lambda: 0.0)
    with caplog.at_level(logging.WARNING):
        assert count_tokens("a" * 9, table) == TokenCount(3, "bytes/4", exact=False)
        assert count_item_tokens(b'{"type":"x"}', table) == TokenCount(3, "bytes/4", exact=False)
    assert len(caplog.records) == 1
    assert "bytes / 4" in caplog.text


def test_loading_is_tried_again_after_a_while_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B71: one failure switched exact counting off for good."""
    now_s = 0.0
    tries = 0

    def read() -> bytes:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError(24, "Too many open files")
        return shipped_table()

    table = TokenTable(read, clock=lambda: now_s)

    def method_at(seconds: float) -> str:
        nonlocal now_s
        now_s = seconds
        return count_tokens("hello", table).method

    methods = [method_at(seconds) for seconds in (0.0, 59.0, 60.0, 119.0, 120.0)]
    assert methods == ["bytes/4"] * 4 + ["o200k_base"]
    assert tries == 3
    assert len(caplog.records) == 1


def test_without_tiktoken_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_tiktoken(name: str, *rest: Any) -> Any:
        if name == "tiktoken":
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_tiktoken)
    assert count_tokens("hello world", TokenTable()) == TokenCount(3, "bytes/4", exact=False)


def test_threads_that_count_first_at_once_load_the_table_once() -> None:
    reads: list[int] = []

    def read() -> bytes:
        reads.append(1)
        return shipped_table()

    table = TokenTable(read)
    threads = [threading.Thread(target=table.encoding) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reads) == 1


# --- text


def test_a_text_is_counted_by_the_table() -> None:
    assert count_tokens("hello world") == TokenCount(2, "o200k_base", exact=True)
    assert count_tokens("") == TokenCount(0, "o200k_base", exact=True)


@pytest.mark.parametrize("name", ["<|endoftext|>", "<|endofprompt|>", "<|im_start|>"])
def test_the_name_of_a_special_token_is_ordinary_text(name: str) -> None:
    """B67: counting such a text raised ValueError, and one token would hide what the text costs."""
    assert count_tokens(name).count > 3
    item = as_item({"type": "function_call", "name": name, "call_id": "c", "arguments": name})
    assert count_item_tokens(item).count > 2 * count_tokens(name).count
    assert estimate_tokens(item) > 0


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", [" ", "a", "\n", "é", "\t ", "'", "中", "a ", "\u200b"])
def test_a_million_equal_characters_are_counted_in_bounded_time(text: str) -> None:
    """B69 and the panic of a million spaces."""
    result = count_tokens(text * (1_000_000 // len(text)))
    assert result.exact
    assert 0 < result.count <= 1_000_000


def test_a_long_text_is_counted_in_pieces() -> None:
    text = "The build failed because an index was stale; run the tests again.\n" * 5_000
    pieces = [text[i : i + CHUNK_CHARS_MAX] for i in range(0, len(text), CHUNK_CHARS_MAX)]
    assert len(pieces) == 4
    assert count_tokens(text).count == sum(count_tokens(piece).count for piece in pieces)


def test_a_lone_surrogate_is_counted() -> None:
    """It cannot come through the protocol, but a title or path of the system may hold one."""
    assert count_tokens("a\ud800b").count > 0


# --- items


def test_an_item_without_media_is_its_json_text() -> None:
    item = b'{"type": "message","role":"user","content":"1.0 caf\\u00e9"}'
    assert count_item_tokens(item) == count_tokens(item.decode())
    assert estimate_tokens(item) == -(-len(item) // 4)


@pytest.mark.parametrize("part", ["input_text", "output_text", "text", "refusal"])
def test_every_text_of_an_item_counts(part: str) -> None:
    short, long = (
        user_message({"type": part, "text": "zebra " * repeats}) for repeats in (100, 5_000)
    )
    assert count_item_tokens(long).count - count_item_tokens(short).count >= 4_900
    assert estimate_tokens(long) - estimate_tokens(short) >= 4_900


@pytest.mark.parametrize("bytes_more", [0, 1, 1_000, 1_000_000])
def test_more_bytes_in_the_same_image_are_no_more_tokens(bytes_more: int) -> None:
    """B18: one message "hi" with a 1 MB data URL counted as hundreds of thousands of tokens."""
    text = {"type": "input_text", "text": "hi"}
    item = user_message(text, image_part(png(3_000 + bytes_more)))
    base = user_message(text, image_part(png(3_000)))
    assert count_item_tokens(item) == count_item_tokens(base)
    assert estimate_tokens(item) == estimate_tokens(base)
    assert IMAGE_TOKENS < estimate_tokens(item) < IMAGE_TOKENS + 50
    assert IMAGE_TOKENS < count_item_tokens(item).count < IMAGE_TOKENS + 50
    assert not count_item_tokens(item).exact


IMAGE = png(3_000).partition(",")[2]
FILE = noise(3_000)


@pytest.mark.parametrize(
    ("value", "flat_tokens"),
    [
        ({"type": "image_generation_call", "id": "ig", "result": IMAGE}, IMAGE_TOKENS),
        ({"content": [{"type": "input_file", "file_data": FILE}]}, FILE_TOKENS),
        (
            {"content": [{"type": "input_file", "file_data": f"data:a/b;base64,{FILE}"}]},
            FILE_TOKENS,
        ),
        ({"content": [{"type": "input_file", "file_id": "file-1"}]}, FILE_TOKENS),
        ({"content": [{"type": "input_image", "file_id": "file-1"}]}, IMAGE_TOKENS),
        ({"content": [{"type": "input_image", "image_url": "https://a.example/b"}]}, IMAGE_TOKENS),
        ({"content": [{"type": "image_url", "image_url": {"url": png(9)}}]}, IMAGE_TOKENS),
        ({"output": {"type": "computer_screenshot", "image_url": png(3_000)}}, IMAGE_TOKENS),
        ({"output": [image_part(png(3_000)), image_part(png(9))]}, 2 * IMAGE_TOKENS),
        ({"outputs": [{"type": "image", "url": png(3_000)}]}, IMAGE_TOKENS),
        (
            {"content": [{"type": "image", "source": {"type": "base64", "data": IMAGE}}]},
            IMAGE_TOKENS,
        ),
        ({"output": f"![a]({png(3_000)}) ![b]({png(3_000)})"}, 2 * IMAGE_TOKENS),
        ({"output": json.dumps({"pdf": FILE})}, FILE_TOKENS),
        ({"type": ["image_url"], "image_url": png(3_000)}, IMAGE_TOKENS),
        ({"type": "input_image", "image_url": None}, IMAGE_TOKENS),
        ({"type": "input_image"}, 0),
        ({"output": "image_url input_image ;base64,"}, 0),
    ],
)
def test_each_image_and_file_counts_once_by_its_flat_number(
    value: dict[str, object], flat_tokens: int
) -> None:
    count = count_item_tokens(as_item(value))
    assert flat_tokens < count.count < flat_tokens + 60
    assert count.exact is (flat_tokens == 0)
    filler = "x y " * DECODED_BYTES_MIN
    rest = as_item({"filler": filler})
    estimate = estimate_tokens(as_item({**value, "filler": filler}))
    assert flat_tokens <= estimate - estimate_tokens(rest) < flat_tokens + 60


def test_a_payload_with_escaped_slashes_is_media_too() -> None:
    """Some JSON writers escape every slash."""
    item = as_item({"type": "image_generation_call", "result": IMAGE}).replace(b"/", b"\\/")
    assert b"\\/" in item
    assert estimate_tokens(item) < IMAGE_TOKENS + 50


@pytest.mark.parametrize("member", ["encrypted_content", "signature", "thinkingSignature"])
def test_sealed_text_counts_by_the_bytes_it_holds(member: str) -> None:
    """Encrypted reasoning is as long as what was thought, and neither an image nor a file."""
    item = as_item({"type": "reasoning", member: noise(9_000)})  # 12,000 characters
    assert 12_000 * 3 // 16 < estimate_tokens(item) < 12_000 * 3 // 16 + 20
    assert 12_000 * 3 // 16 < count_item_tokens(item).count < 12_000 * 3 // 16 + 30


@pytest.mark.parametrize(
    "item",
    [
        b"",
        b"nope" * 1_000,
        b"[" * 100_000,
        b'{"a":"\xff"}' * 1_000,
        as_item(image_part(png(9_000)))[:-1] + b',"n":1e999}',
    ],
)
def test_what_cannot_be_decoded_counts_as_text(item: bytes) -> None:
    """An estimate never makes an append fail; whether an item is valid is asked elsewhere."""
    assert estimate_tokens(item) == -(-len(item) // 4)
    assert count_item_tokens(item).exact


async def test_items_are_counted_together_in_a_thread() -> None:
    items = [user_message({"type": "input_text", "text": f"number {n}"}) for n in range(20)]
    single = [count_item_tokens(item).count for item in items]
    assert await count_tokens_of(items) == TokenCount(sum(single), "o200k_base", exact=True)
    assert await count_tokens_of([]) == TokenCount(0, "o200k_base", exact=True)
    with_image = [*items, user_message(image_part(png(5_000)))]
    assert (await count_tokens_of(with_image)).exact is False


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_a_cancelled_count_ends_at_the_next_piece(
    anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B83: work in a thread went on after its caller was gone, and threads piled up."""
    started = threading.Event()
    go_on = threading.Event()
    pieces: list[int] = []

    class Gated(tiktoken.Encoding):
        def __init__(self) -> None:
            """Nothing is encoded."""

        def encode(self, text: str, **_: object) -> list[int]:
            pieces.append(len(text))
            started.set()
            assert go_on.wait(5)
            return []

    table = TokenTable()
    monkeypatch.setattr(table, "encoding", Gated)
    limiter = anyio.CapacityLimiter(1)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            group.start_soon(count_tokens_of, [b"x" * 3_000_000], table, limiter)
            await anyio.to_thread.run_sync(started.wait, 5)
            group.cancel_scope.cancel()
            go_on.set()
    assert pieces == [CHUNK_CHARS_MAX]
    assert limiter.borrowed_tokens == 0


def recorded_items(folder: Path) -> Sequence[bytes]:
    """The items of all recordings in a folder of the corpus."""
    items: list[bytes] = []
    for path in sorted(folder.glob("*.items.json")):
        items += map(as_item, json.loads(path.read_text("utf-8")))
    return items


def test_figures_of_recorded_items_are_close_and_sane(corpus: Path) -> None:
    folders = [
        path for path in sorted(corpus.iterdir()) if path.name.startswith(("13", "14", "15", "16"))
    ]
    items = [item for folder in folders for item in recorded_items(folder)]
    assert len(items) > 100
    assert max(map(len, items)) > 2_000_000
    for item in items:
        exact = count_item_tokens(item).count
        assert exact < 30_000
        assert 0.3 * exact - 1_000 < estimate_tokens(item) < 3 * exact + 1_000


def test_every_naughty_string_is_counted(corpus: Path) -> None:
    naughty: list[str] = json.loads(
        (corpus / "28-naughty-strings" / "blns.json").read_text("utf-8")
    )
    for text in naughty:
        assert count_tokens(text).exact
        assert count_item_tokens(as_item({"content": text})).exact
