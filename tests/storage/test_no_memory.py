"""Memory that ends anywhere within the transaction of a compaction (PROMISES.md F5)."""

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CRASHES_MAX = 100


@pytest.mark.promise("F5")
def test_memory_that_ends_within_a_compaction_leaves_no_half_of_it(
    project_root: Path, tmp_path: Path
) -> None:
    """Each allocation fails in turn: the change is refused as a whole, or made, and the same store
    goes on. Where a library crashes instead, that is as good as a kill: nothing was made.
    """
    if importlib.util.find_spec("_testcapi") is None:
        pytest.skip("NOT TESTED: failing allocations need _testcapi, which this Python has not")
    outcomes: dict[int, str] = {}
    for _ in range(CRASHES_MAX):
        first, made = len(outcomes), list(outcomes.values()).count("made")
        run = subprocess.run(
            [
                *(sys.executable, "-m", "tests.storage.no_memory"),
                *(str(tmp_path / "store"), str(first), str(made)),
            ],
            cwd=project_root,
            capture_output=True,
            text=True,
            check=False,
        )
        for line in run.stdout.splitlines():
            nth, _, outcome = line.partition(" ")
            outcomes[int(nth)] = outcome or "crashed"
        if run.returncode == 0:
            break
        assert run.returncode in (-signal.SIGSEGV, -signal.SIGABRT), run.stderr[-5000:]
        assert len(outcomes) > first, "it crashed before anything was tried"
    else:
        pytest.fail("it crashes on and on")
    assert list(outcomes) == list(range(len(outcomes)))
    assert list(outcomes.values()).count("refused") > 50
