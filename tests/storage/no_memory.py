"""A process in which one allocation after the other fails within the transaction of a compaction.

    python -m tests.storage.no_memory FOLDER FIRST GENERATION

Prints of each allocation whether the change was made or refused; ends with an error where the store
and its answer do not agree. It may crash, since libraries in C do where memory ends; then a next
process goes on with the same store.
"""

import importlib
import sys
from pathlib import Path
from typing import Any, Final

import anyio
from tests.crashlab.workload import Clock, done, items

from recapd.storage.entry import Entry, Reminder, encode_entry
from recapd.storage.ledger import Ledger
from recapd.storage.sqlite import open_store
from recapd.storage.store import History, NewSession, Query, Receipt, Replacement, Store, Tokens

_testcapi: Any = importlib.import_module("_testcapi")  # of CPython's own tests; it has no types

_SPARED: Final = 25  # in a row, after which no allocation is left to fail
_FIRST_MAX: Final = 3000


class Scarce:
    """Lets the allocation number `nth` within `Ledger.replace` fail, counted from 0; None: none."""

    def __init__(self) -> None:
        self.nth: int | None = None
        replace = Ledger.replace

        def scarce(ledger: Ledger, *arguments: Any, **more: Any) -> Any:
            if self.nth is None:
                return replace(ledger, *arguments, **more)
            _testcapi.set_nomemory(self.nth, self.nth + 1)
            try:
                return replace(ledger, *arguments, **more)
            finally:
                _testcapi.remove_mem_hooks()

        setattr(Ledger, "replace", scarce)  # noqa: B010  # for a type checker it is another function


async def look(store: Store) -> tuple[int, int, list[bytes]]:
    session = await store.session("a")
    page = await store.page("a", generation=session.generation, limit=10_000, bytes_max=1 << 30)
    return session.revision, session.generation, list(page.entries)


async def compact(store: Store, operation_id: str) -> bool:
    """Whether it was made; either way all is as it must be, and the store goes on."""
    await store.append("a", items("one", "two")).wait()
    await store.begin("a", Receipt(operation_id, "session.compact", b"")).wait()
    session = await store.session("a")
    archive = await store.archive(session, "compaction", operation_id)
    before = await look(store)
    item = items("summary")[0].item
    reminder = Reminder(session.generation + 1, operation_id, session.revision)
    line = encode_entry(Entry(session.next_entry_id, 0, item, reminder))
    change = Replacement(
        operation_id,
        archive,
        History([line], [], session.next_entry_id + 1, Tokens(7, 0)),
        {"retained_entry_ids": [1]},
    )
    try:
        await store.replace("a", change, render=done).wait()
    except Exception:  # CPython makes other errors of it in places, such as a TypeError of stat
        made = False
        assert await look(store) == before
        await store.discard_archive("a", archive.revision)
        await store.end(operation_id, "failed", b"{}", {}).wait()
    else:
        made = True
        assert await look(store) == (before[0] + 1, before[1] + 1, [line])
    return made


async def main(folder: Path, first: int, generation: int) -> None:
    """Go on from allocation `first` with a store that has made so many compactions."""
    scarce = Scarce()
    spared = 0
    async with open_store(folder, now_ms=Clock()) as store:
        if first == 0:
            await store.create(NewSession("a")).wait()
        for nth in range(first, _FIRST_MAX):
            session = await store.session("a")
            assert session.generation == generation
            print(nth, end=" ", flush=True)
            scarce.nth = nth
            made = await compact(store, f"op-{nth}")
            print("made" if made else "refused", flush=True)
            generation, spared = generation + made, (spared + 1) * made
            if spared == _SPARED:
                break
        last = await look(store)
    async with open_store(folder, now_ms=Clock()) as store:
        assert await look(store) == last
        named = sum(len(one.archived_revisions) for one in await store.sessions(Query()))
        files = [path for path in (folder / "archives").rglob("*") if path.is_file()]
        assert len(files) == named == generation


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
