"""Rebuild `daemon/compaction/o200k_base.xz` from the npm package js-tiktoken.

    python scripts/make_o200k.py package/dist/ranks/o200k_base.cjs

It is proven to be the published table: `o200k_base.tiktoken`, as OpenAI publishes it, is written
again from the package's ranks and must have the SHA-256 that tiktoken asks of it.
"""

import base64
import hashlib
import json
import lzma
import re
import sys
from pathlib import Path

PUBLISHED_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
PACKED_FILE = Path(__file__).resolve().parent.parent / "daemon" / "compaction" / "o200k_base.xz"


def tokens_of_package(source: str) -> list[bytes]:
    """The tokens in order of rank, from the text of the package's module.

    The ranks are one string of lines: a word, the rank of the first token, then tokens of rising
    rank in base64.
    """
    found = re.search(r'"bpe_ranks":("(?:[^"\\]|\\.)*")', source)
    if found is None:
        raise SystemExit("no ranks in this file")
    ranks: dict[int, bytes] = {}
    for line in str(json.loads(found[1])).splitlines():
        _, first, *encoded = line.split(" ")
        ranks.update(enumerate(map(base64.b64decode, encoded), int(first)))
    return [ranks[rank] for rank in range(len(ranks))]


def published_file(tokens: list[bytes]) -> bytes:
    """The table as OpenAI publishes it: a token in base64 and its rank on each line."""
    return b"".join(
        b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)
    )


def packed_table(tokens: list[bytes]) -> bytes:
    """The table as recapd unpacks it: by rank, one byte of length and the token's bytes."""
    return b"".join(bytes((len(token),)) + token for token in tokens)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    tokens = tokens_of_package(Path(sys.argv[1]).read_text("utf-8"))
    if hashlib.sha256(published_file(tokens)).hexdigest() != PUBLISHED_SHA256:
        raise SystemExit("these are not the published ranks; nothing written")
    table = packed_table(tokens)
    PACKED_FILE.write_bytes(lzma.compress(table, preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(tokens)} tokens, {PACKED_FILE.stat().st_size} bytes in {PACKED_FILE.name}")
    print(f"TABLE_SHA256 = {hashlib.sha256(table).hexdigest()}")


if __name__ == "__main__":
    main()
