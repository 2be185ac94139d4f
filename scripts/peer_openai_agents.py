"""The work of `workloads.py` on openai-agents' AsyncSQLiteSession, in this process.

`python -m scripts.peer_openai_agents FOLDER [--quick]`, where that library is installed. Nothing is
synced and nothing archived there. The model is replaced by one that answers at once.
"""

import statistics
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scripts.peers import peer_main, timed_us
from scripts.targets import items
from scripts.workloads import Figures, Sizes, percentile_99

FIRST_ANSWER = """
import asyncio, sys
from agents.extensions.memory import AsyncSQLiteSession
async def main():
    session = AsyncSQLiteSession("s", sys.argv[1])
    print(len(await session.get_items()))
    await session.close()
asyncio.run(main())
"""


class Model:
    """As much of a client as a compaction asks for."""

    def __init__(self) -> None:
        self.responses = SimpleNamespace(compact=self.compact)

    async def compact(self, **_: Any) -> Any:
        return SimpleNamespace(output=items(2))


async def measure(folder: Path, sizes: Sizes) -> Figures:
    """All that the library can do of the table."""
    memory = import_module("agents.extensions.memory")
    compaction = import_module("agents.memory").OpenAIResponsesCompactionSession

    def opened(name: str, file: str = "a.db") -> Any:
        return memory.AsyncSQLiteSession(name, folder / file)

    session = opened("one")
    await session.add_items(items(20))
    single = [await timed_us(session.add_items([made])) for made in items(sizes.appends)]
    hundreds = [await timed_us(session.add_items(items(100))) / 100 for _ in range(10)]
    await session.close()

    figures: Figures = {
        "append_median": statistics.median(single),
        "append_p99": percentile_99(single),
        "append_100_items": statistics.median(hundreds),
    }

    session = opened("whole", "read.db")
    await session.add_items(items(sizes.history))
    reads = [await timed_us(session.get_items()) for _ in range(sizes.reads)]
    figures["read_10k"] = statistics.median(reads) / 1000
    await session.close()

    for figure, count in (("compact_200", min(200, sizes.history)), ("compact_10k", sizes.history)):
        times: list[float] = []
        for number in range(1 + sizes.compactions // 2):
            session = opened(f"{number}", f"{figure}.db")
            await session.add_items(items(count))
            compacting = compaction(
                session.session_id,
                session,
                client=Model(),
                model="gpt-4.1",
                compaction_mode="input",
            )
            times.append(await timed_us(compacting.run_compaction({"force": True})) / 1000)
            if len(await session.get_items()) != 2:
                raise RuntimeError("it did not compact")
            await session.close()
        figures[figure] = statistics.median(times)

    return figures


if __name__ == "__main__":
    peer_main(measure, FIRST_ANSWER)
