"""How many tokens items are: an estimate on the append path, an exact count beside the event loop.

Media never count as text (B18): an image is `IMAGE_TOKENS` and a file `FILE_TOKENS`, however many
bytes it has. A content part that names one (`input_image`, `input_file`, Chat Completions'
`image_url`, a screenshot) counts once, whether it holds bytes, a URL or a file id; beyond that,
each payload that `media.find_payloads` finds counts once. A payload under `encrypted_content` or a
signature is sealed text and counts 3 bytes for 4 characters. Everything else in the item's JSON
text counts as it stands, names and punctuation included.
"""

import hashlib
import logging
import lzma
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Literal, TypeAlias

import anyio.from_thread
import anyio.to_thread
import msgspec

from recapd.daemon.compaction.media import MediaKind, find_payloads, payload_kind

if TYPE_CHECKING:
    from tiktoken import Encoding

logger = logging.getLogger(__name__)

Json: TypeAlias = "str | float | list[Json] | dict[str, Json] | None"

IMAGE_TOKENS = 1_000
"""For any image: providers charge 85 to 1,600 by size and detail, 700 to 1,200 for a screenshot."""

FILE_TOKENS = 2_000
"""For any file: one PDF page costs 1,500 to 3,000, and how many pages there are is not visible."""

BYTES_PER_TOKEN = 4  # of JSON and prose under o200k_base; other scripts take fewer bytes per token

DECODED_BYTES_MIN = 2_048
"""From this length on the estimate looks for media; what is shorter is 512 tokens at most."""

CHUNK_CHARS_MAX = 100_000
"""Text is encoded in pieces of this length: 1,000,000 spaces at once can end in a Rust panic, and a
cancelled count goes on to the end of its piece (≤ 60 ms). A cut can add a token: the count is exact
for each piece."""

RETRY_AFTER_S = 60.0
"""After a failed load: a lack of descriptors or memory passes, and a damaged file costs 60 ms."""

TABLE_FILE = "o200k_base.xz"
TABLE_SHA256 = "bac143fe7fe950090c6e4ed9a2f80de5412a92495758b52becbbe5a7eea25ecb"
"""Of the unpacked table. `scripts/make_o200k.py` proves that it holds the published ranks."""

_PARTS: dict[str, MediaKind] = {
    "input_image": "image",
    "image_url": "image",
    "computer_screenshot": "image",
    "input_file": "file",
}
_PART_MEMBERS = frozenset({"image_url", "file_data", "file_url", "file_id"})
_FLAT_TOKENS: dict[MediaKind, int] = {"image": IMAGE_TOKENS, "file": FILE_TOKENS}

# How o200k_base cuts text into words; tiktoken's own definition would fetch the table.
_WORDS = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_SPECIAL_TOKENS = {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class TokenCount:
    """A number of tokens and how it came about.

    `exact` is true when the table counted every one of them: no fallback, no flat number for media.
    """

    count: int
    method: Literal["o200k_base", "bytes/4"]
    exact: bool


def _read_shipped_table() -> bytes:
    return resources.files("recapd.daemon.compaction").joinpath(TABLE_FILE).read_bytes()


class TokenTable:
    """The `o200k_base` encoding, loaded on first use and then kept (64 MB); safe between threads.

    Where the table or tiktoken cannot be loaded, the log says so once, and it is tried again after
    `RETRY_AFTER_S`.
    """

    def __init__(
        self,
        read_packed: Callable[[], bytes] = _read_shipped_table,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read_packed` gives the packed table; `clock` gives seconds that never fall."""
        self._read_packed = read_packed
        self._clock = clock
        self._lock = threading.Lock()
        self._encoding: Encoding | None = None
        self._retry_at_s = float("-inf")
        self._logged = False

    @property
    def loaded(self) -> bool:
        """Whether a count takes no longer than its text asks for."""
        return self._encoding is not None

    def encoding(self) -> "Encoding | None":
        """The encoding, or None while it cannot be loaded.

        The first call takes about 0.4 s: not for the event loop.
        """
        with self._lock:
            if self._encoding is None and self._clock() >= self._retry_at_s:
                self._encoding = self._load()
            return self._encoding

    def _load(self) -> "Encoding | None":
        try:
            return _make_encoding(read_ranks(lzma.decompress(self._read_packed())))
        except (ImportError, OSError, MemoryError, ValueError, lzma.LZMAError) as error:
            self._retry_at_s = self._clock() + RETRY_AFTER_S
            if not self._logged:
                self._logged = True
                reason = type(error).__name__
                logger.warning("o200k_base cannot be loaded (%s): tokens are bytes / 4", reason)
            return None


SHARED_TABLE = TokenTable()

_INLINE_BYTES = 40_000  # counted in 2 ms; from there on it is worth a thread


def estimate_tokens(item: bytes) -> int:
    """About how many tokens one item is, `item` being its JSON text: bytes ÷ 4, rounded up.

    Made for the append path: an item of less than `DECODED_BYTES_MIN` counts by its bytes alone, in
    0.3 µs; a longer one is decoded to take its media at their flat numbers, 1 to 3 µs a kilobyte.
    """
    if len(item) < DECODED_BYTES_MIN:
        return _by_bytes(item)
    text, flat_tokens = _without_media(item)
    return _by_bytes(text) + flat_tokens


def count_tokens(text: str, table: TokenTable = SHARED_TABLE) -> TokenCount:
    """The tokens of `text`. The names of special tokens in it are ordinary text (B67)."""
    return _count(((text.encode("utf-8", "surrogatepass"), 0),), table, lambda: None)


def count_item_tokens(item: bytes, table: TokenTable = SHARED_TABLE) -> TokenCount:
    """The tokens of one item, `item` being its JSON text."""
    return _count((_without_media(item),), table, lambda: None)


async def count_tokens_of(
    items: Sequence[bytes],
    table: TokenTable = SHARED_TABLE,
    limiter: anyio.CapacityLimiter | None = None,
) -> TokenCount:
    """The tokens of all items together.

    Counted in a worker thread, unless it is quick; a cancel ends it at the next piece (B83).
    `limiter` bounds how many threads there are, by default anyio's 40.
    """
    texts = (_without_media(item) for item in items)
    if table.loaded and limiter is None and sum(map(len, items)) <= _INLINE_BYTES:
        return _count(texts, table, lambda: None)
    return await anyio.to_thread.run_sync(
        _count, texts, table, anyio.from_thread.check_cancelled, limiter=limiter
    )


def read_ranks(table: bytes) -> dict[bytes, int]:
    """The ranks in an unpacked table: by rank, one byte of length and the token's bytes.

    Raises:
        ValueError: the table is not the one with `TABLE_SHA256`.
    """
    if hashlib.sha256(table).hexdigest() != TABLE_SHA256:
        raise ValueError("the token table is damaged")
    ranks: dict[bytes, int] = {}
    place = 0
    while place < len(table):
        end = place + 1 + table[place]
        ranks[table[place + 1 : end]] = len(ranks)
        place = end
    return ranks


def _make_encoding(ranks: dict[bytes, int]) -> "Encoding":
    from tiktoken import Encoding  # 40 ms that neither the start nor an append should pay

    return Encoding(
        "o200k_base", pat_str=_WORDS, mergeable_ranks=ranks, special_tokens=_SPECIAL_TOKENS
    )


def _count(
    texts: Iterable[tuple[bytes, int]], table: TokenTable, checkpoint: Callable[[], None]
) -> TokenCount:
    """The tokens of texts, each with the number that stands for what was taken out of it.

    `checkpoint` is called before each piece; what it raises ends the count.
    """
    encoding = table.encoding()
    tokens = flat_tokens = 0
    for text, flat in texts:
        checkpoint()
        flat_tokens += flat
        tokens += _by_bytes(text) if encoding is None else _by_table(text, encoding, checkpoint)
    if encoding is None:
        return TokenCount(tokens + flat_tokens, "bytes/4", exact=False)
    return TokenCount(tokens + flat_tokens, "o200k_base", exact=flat_tokens == 0)


def _by_bytes(text: bytes) -> int:
    return -(-len(text) // BYTES_PER_TOKEN)


def _by_table(text: bytes, encoding: "Encoding", checkpoint: Callable[[], None]) -> int:
    tokens = 0
    chars = text.decode("utf-8", "replace")
    for start in range(0, len(chars), CHUNK_CHARS_MAX):
        checkpoint()
        piece = chars[start : start + CHUNK_CHARS_MAX]
        # Never encode_ordinary: it panics, with a BaseException, where encode raises or copes.
        tokens += len(encoding.encode(piece, disallowed_special=()))
    return tokens


def _without_media(item: bytes) -> tuple[bytes, int]:
    """The item's JSON text less its media and sealed text, and the tokens that stand for those."""
    try:
        rest, flat_tokens = _strip(_decode(item), "")
        return (_encode(rest), flat_tokens) if flat_tokens else (item, 0)
    except (msgspec.MsgspecError, RecursionError):
        return item, 0  # JSON that Python cannot hold, such as 1e999, counts as text


def _strip(value: Json, member: str) -> tuple[Json, int]:
    """`value` less its media, and the tokens that stand for them; `member` is where it is held."""
    if isinstance(value, str):
        return _strip_text(value, member)
    if isinstance(value, list):
        stripped = [_strip(element, member) for element in value]
        return [rest for rest, _ in stripped], sum(tokens for _, tokens in stripped)
    if isinstance(value, dict):
        return _strip_object(value)
    return value, 0


def _strip_object(value: dict[str, Json]) -> tuple[dict[str, Json], int]:
    part = value.get("type")
    kind = _PARTS.get(part) if isinstance(part, str) else None
    carried = _PART_MEMBERS & value.keys() if kind else frozenset[str]()
    tokens = _FLAT_TOKENS[kind] if kind and carried else 0
    rest: dict[str, Json] = {}
    for name, element in value.items():
        if name not in carried:
            rest[name], more = _strip(element, name)
            tokens += more
    return rest, tokens


def _strip_text(text: str, member: str) -> tuple[str, int]:
    sealed = member == "encrypted_content" or member.lower().endswith("signature")
    pieces: list[str] = []
    tokens = copied = 0
    for start, end in find_payloads(text):
        pieces.append(text[copied:start])
        tokens += (
            _sealed_tokens(end - start) if sealed else _FLAT_TOKENS[payload_kind(text[start:end])]
        )
        copied = end
    return "".join(pieces) + text[copied:], tokens


def _sealed_tokens(chars: int) -> int:
    """Of text that only the provider can open: base64 holds 3 bytes in 4 characters."""
    return -(-chars * 3 // (4 * BYTES_PER_TOKEN))
