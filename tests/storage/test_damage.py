"""Damaged images of a store: what they give is right, refused, or found (PROMISES.md R4, R5)."""

import os
import random
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from recapd.storage.database import Damaged
from recapd.storage.entry import Entry
from recapd.storage.errors import ArchiveCorrupt, ArchiveMissing, RevisionUnknown, UnknownSession
from recapd.storage.sqlite import open_store
from recapd.storage.store import NewItem, NewSession, Session, Store

Compact = Callable[..., Awaitable[Session]]

IMAGES: Final = 3000 if os.environ.get("RECAPD_LONG") == "1" else 250
PAGE_BYTES: Final = 4096
NAMES: Final = ("a", "b", "c")
REVISIONS: Final = (1, 3)  # archived; the present one is 4


def text(number: int) -> bytes:
    return b'{"role":"user","content":"%d %b"}' % (number, b"x" * 300)


async def fill(folder: Path, compact: Compact) -> tuple[bytes, bytes]:
    """A store of three sessions. Returns its database in the middle of this and at the end."""

    async def part(first: int) -> bytes:
        async with open_store(folder) as store:
            for name in NAMES:
                if first == 0:
                    await store.create(NewSession(name), [NewItem(text(n), 100) for n in range(60)]).wait()
                else:
                    await store.append(name, [NewItem(text(first), 100)]).wait()
                await compact(
                    store,
                    name,
                    f"{name}-{first}",
                    [Entry(1000 + first + n, 0, text(n)) for n in range(40)],
                )
        return (folder / "store.db").read_bytes()

    return await part(0), await part(100)


async def histories(store: Store, name: str) -> list[list[bytes] | str]:
    """The present history and the archived ones; in the place of one that is refused, how."""
    found: list[list[bytes] | str] = []
    for revision in (None, *REVISIONS):
        try:
            page = await store.page(name, revision=revision, limit=1000, bytes_max=1 << 20)
        except (Damaged, ArchiveCorrupt, ArchiveMissing, RevisionUnknown) as error:
            found.append(type(error).__name__)
        else:
            found.append(page.entries)
    return found


def images(earlier: bytes, whole: bytes, dice: random.Random) -> Iterator[tuple[str, bytes]]:
    """Databases that SQLite did not write, and what was done to each."""
    pages = len(whole) // PAGE_BYTES

    def page(data: bytes, number: int) -> bytes:
        return data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]

    def put(number: int, content: bytes) -> bytes:
        return whole[: number * PAGE_BYTES] + content + whole[(number + 1) * PAGE_BYTES :]

    while True:
        number = dice.randrange(pages)
        yield "zeroed", put(number, bytes(PAGE_BYTES))
        yield "cut", whole[: dice.randrange(1, len(whole))]
        yield "cut", whole[: number * PAGE_BYTES or PAGE_BYTES // 2]
        yield "garbled", put(number, dice.randbytes(PAGE_BYTES))
        bit = dice.randrange(len(whole) * 8)
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        yield "flipped", bytes(flipped)
        at = dice.randrange(1, pages) * PAGE_BYTES
        yield "torn", earlier[:at] + whole[at:]
        yield "torn", whole[:at] + earlier[at:]
        other = dice.randrange(pages)
        if page(whole, number) != page(whole, other):
            yield "swapped", put(number, page(whole, other))


@pytest.mark.promise("R5")
async def test_a_damaged_database_is_refused_or_found_and_never_served_as_right(
    folder: Path, compact: Compact, tmp_path: Path
) -> None:
    """Each image either stops the start, and every file is as it was; or what is read of it is
    right, refused, or told by `verify`. A letter that is another one in a live item is not among
    this (docs/durability.md): such an image is known by its length.
    """
    earlier, whole = await fill(folder, compact)
    async with open_store(folder) as store:
        right = {name: await histories(store, name) for name in NAMES}
    assert all(isinstance(one, list) for name in NAMES for one in right[name])
    archives = {path: path.read_bytes() for path in (folder / "archives").rglob("*.zst")}
    outcomes: Counter[tuple[str, str]] = Counter()
    made = images(earlier, whole, random.Random(0))
    for number in range(IMAGES):
        kind, image = next(made)
        trial = tmp_path / "trial"
        shutil.copytree(folder, trial)
        (trial / "store.db").write_bytes(image)
        outcome = "right"
        try:
            async with open_store(trial) as store:
                for name in NAMES:
                    try:
                        given = await histories(store, name)
                        faults = (await store.verify(name, read=lambda _: True)).faults
                    except UnknownSession:
                        outcome = "lost"
                        continue
                    if given == right[name]:
                        continue
                    outcome = "found" if faults else "SILENT"
                    if not faults:
                        print(number, kind, name, [g if isinstance(g, str) else len(g) for g in given], [i for i,(x,y) in enumerate(zip(given,right[name])) if x!=y])
        except* Damaged:
            outcome = "refused"
            assert (trial / "store.db").read_bytes() == image, (number, kind)
            for path, data in archives.items():
                assert (trial / path.relative_to(folder)).read_bytes() == data, (number, kind)
        outcomes[kind, outcome] += 1
        shutil.rmtree(trial)
    print(outcomes)
