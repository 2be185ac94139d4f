"""A store whose syncs take long, in a process under the shim: `python -m tests.crashlab.slow_disk`.

Prints "made" and "read" in the order in which they ended: a change was handed over first, then
reads of another session one after the other.
"""

import sys
from pathlib import Path
from typing import Final

import anyio
from tests.crashlab.shim import Action, Kind, Shim
from tests.crashlab.workload import Clock, items

from recapd.storage.sqlite import open_store
from recapd.storage.store import NewSession, Store

READS: Final = 50
SYNC_US: Final = 2_000_000
"""Longer than fifty reads take on the slowest machine that the tests run on."""


async def main(folder: Path) -> None:
    shim = Shim()
    shim.watch(folder)
    async with open_store(folder, now_ms=Clock()) as store:
        for session_id in "ab":
            await store.create(NewSession(session_id), items("first")).wait()
        shim.arm(Kind.SYNC, nth=1, action=Action.DELAY, value=SYNC_US)
        async with anyio.create_task_group() as tasks:
            pending = store.append("a", items("second"))

            async def wait() -> None:
                await pending.wait()
                print("made")

            tasks.start_soon(wait)
            await _read(store)
        print("delayed" if shim.fired else "not delayed")


async def _read(store: Store) -> None:
    for _ in range(READS):
        page = await store.page("b", limit=10, bytes_max=1 << 20)
        assert len(page.entries) == 1
        print("read")


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]))
