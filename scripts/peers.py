"""Libraries that keep histories, measured on the same work as recapd (`scripts/bench --peer`).

Each gets an environment of its own, from the package index, which is removed afterwards; its script
(`peer_*.py`) runs there and prints its figures by the names that the rows have.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final

from scripts.workloads import QUICK, Figures, Sizes

REQUIREMENTS: Final = {
    "openai-agents": ["openai-agents", "aiosqlite"],
    "langgraph": ["langgraph", "langgraph-checkpoint-sqlite", "langchain"],
}


def measure(library: str, quick: bool) -> Figures:
    """Install it and run its script. Raises CalledProcessError where either fails."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory(prefix="recapd-") as temporary:
        home = Path(temporary)
        python = home / "environment/bin/python"
        subprocess.run([sys.executable, "-m", "venv", home / "environment"], check=True)
        install = ["-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([python, *install, *REQUIREMENTS[library]], check=True, stdout=sys.stderr)
        (home / "data").mkdir()
        script = f"scripts.peer_{library.replace('-', '_')}"
        printed = subprocess.run(
            [python, "-m", script, home / "data", *(["--quick"] if quick else [])],
            cwd=root,
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
    figures: Figures = json.loads(printed)
    return figures


async def timed_us(work: Awaitable[object]) -> float:
    start = time.perf_counter_ns()
    await work
    return (time.perf_counter_ns() - start) / 1000


def peer_main(
    measure: Callable[[Path, Sizes], Coroutine[Any, Any, Figures]], first_answer: str
) -> None:
    """Be the program of a `peer_*.py`. `first_answer` is one that opens the file that it is given,
    asks once and ends.
    """
    folder = Path(sys.argv[1])
    sizes = QUICK if sys.argv[2:] else Sizes()
    figures = asyncio.run(measure(folder, sizes))
    starts: list[float] = []
    for number in range(sizes.starts):
        program = [sys.executable, "-c", first_answer, str(folder / f"start-{number}.db")]
        start = time.perf_counter_ns()
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        starts.append((time.perf_counter_ns() - start) / 1e6)
    print(json.dumps({**figures, "start": statistics.median(starts)}))
