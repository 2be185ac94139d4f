"""The work of `workloads.py` on langgraph's AsyncSqliteSaver, in this process.

`python -m scripts.peer_langgraph FOLDER [--quick]`, where that library is installed. An append is
an update of the state of a graph that only keeps messages; a compaction is langchain's
SummarizationMiddleware, with a model that answers at once. Nothing is archived there.
"""

import statistics
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.peers import peer_main, timed_us
from scripts.targets import items
from scripts.workloads import Figures, Sizes, percentile_99

FIRST_ANSWER = """
import asyncio, sys
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
async def main():
    async with AsyncSqliteSaver.from_conn_string(sys.argv[1]) as saver:
        graph = StateGraph(MessagesState).add_node("n", lambda state: {}).add_edge(START, "n")
        await graph.compile(checkpointer=saver).aget_state({"configurable": {"thread_id": "s"}})
asyncio.run(main())
"""
NODE = "keep"


def messages(count: int) -> list[Any]:
    """Those of `items`, in its words."""
    kinds = import_module("langchain_core.messages")
    return [
        (kinds.HumanMessage if made["role"] == "user" else kinds.AIMessage)(
            content=made["content"][0]["text"]
        )
        for made in items(count)
    ]


async def measure(folder: Path, sizes: Sizes) -> Figures:
    """All that the library can do of the table."""
    graphs = import_module("langgraph.graph")
    savers = import_module("langgraph.checkpoint.sqlite.aio").AsyncSqliteSaver
    fake = import_module("langchain_core.language_models.fake_chat_models").FakeListChatModel
    middleware = import_module("langchain.agents.middleware").SummarizationMiddleware(
        model=fake(responses=["A summary."]),
        trigger=("messages", 100),
        keep=("messages", 20),
        trim_tokens_to_summarize=None,
    )

    def thread(name: str) -> dict[str, Any]:
        return {"configurable": {"thread_id": name}}

    figures: Figures = {}
    async with savers.from_conn_string(str(folder / "a.db")) as saver:
        builder = graphs.StateGraph(graphs.MessagesState)
        builder.add_node(NODE, lambda state: {})  # pyright: ignore[reportUnknownLambdaType]
        builder.add_edge(graphs.START, NODE)
        graph = builder.compile(checkpointer=saver)

        async def append(name: str, new: list[Any]) -> None:
            await graph.aupdate_state(thread(name), {"messages": new}, as_node=NODE)

        await append("warm", messages(20))
        one = messages(min(200, sizes.appends))  # each writes the whole history anew
        single = [await timed_us(append("one", [message])) for message in one]
        figures["append_median"] = statistics.median(single)
        figures["append_p99"] = percentile_99(single)
        hundreds = [await timed_us(append("hundreds", messages(100))) / 100 for _ in range(10)]
        figures["append_100_items"] = statistics.median(hundreds)

        await append("whole", messages(sizes.history))
        reads = [await timed_us(graph.aget_state(thread("whole"))) for _ in range(sizes.reads)]
        figures["read_10k"] = statistics.median(reads) / 1000

        async def compact(name: str) -> None:
            state = await graph.aget_state(thread(name))
            update = await middleware.abefore_model(state.values, None)
            await graph.aupdate_state(thread(name), update, as_node=NODE)

        counts = {"compact_200": min(200, sizes.history), "compact_10k": sizes.history}
        for figure, count in counts.items():
            times: list[float] = []
            for number in range(1 + sizes.compactions // 2):
                name = f"{figure}-{number}"
                await append(name, messages(count))
                times.append(await timed_us(compact(name)) / 1000)
                state = await graph.aget_state(thread(name))
                if len(state.values["messages"]) > 30:
                    raise RuntimeError("it did not compact")
            figures[figure] = statistics.median(times)

    return figures


if __name__ == "__main__":
    peer_main(measure, FIRST_ANSWER)
