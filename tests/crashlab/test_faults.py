"""Each call to the disk fails in turn (docs/durability.md)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crashlab.faults import FAULTS
from tests.crashlab.shim import NEEDS_GCC, build, preloaded

LONG = os.environ.get("RECAPD_LONG") == "1"


@NEEDS_GCC
@pytest.mark.timeout(1800)
@pytest.mark.promise("D5", "D6", "D7", "F1", "F2", "F3")
def test_a_failing_disk_gets_a_true_answer_and_is_served_again(
    project_root: Path, tmp_path: Path
) -> None:
    """Every call in the long run, each sixth in the ordinary one."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.crashlab.faults", "--json"),
            *("--every", "1" if LONG else "6"),
        ],
        cwd=project_root,
        env=preloaded(build(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout[:5000], run.stderr[-5000:])
    rows = json.loads(run.stdout)["faults"]
    for name in FAULTS:
        assert rows[name]["untrue"] == []
        assert rows[name]["fired"] > 3, name
    # Without errors nothing was tried.
    assert rows["ENOSPC once"]["errors"]["StorageFull"] > 10
    assert rows["EIO of each sync from now on"]["errors"]["StorageError"] > 1
    assert rows["EIO once"]["errors"]["StorageError"] > 10
    assert rows["ENOSPC from now on"]["errors"]["OutcomeUnknown"] > 5
