"""What is seen of a run of the store without a cut (docs/durability.md)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crashlab.shim import NEEDS_GCC, build, preloaded


@NEEDS_GCC
@pytest.mark.timeout(300)
@pytest.mark.promise("D3", "L2", "L3", "T1")
def test_files_are_held_as_promised_and_the_clock_decides_nothing(
    project_root: Path, tmp_path: Path
) -> None:
    """One test, since all of it comes from a few runs under one shim."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.crashlab.trace"],
        cwd=project_root,
        env=preloaded(build(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout[:5000], run.stderr[-5000:])
    printed = json.loads(run.stdout)
    assert printed["order"] == []
    assert printed["holders"] == []
    assert printed["readers"] >= 2  # there was somebody who could have written
    assert printed["outline"] > 100
    assert len(printed["clocks"]) == 6
    for name, same in printed["clocks"].items():
        assert same == {"calls": True, "seen": True}, name
    # A rule that nobody has seen broken proves nothing.
    assert printed["clock that decides"] == {"calls": False}
    assert len(printed["without"]) == 10
    for rule, found in printed["without"].items():
        assert found, rule
