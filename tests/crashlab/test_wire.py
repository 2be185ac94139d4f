"""A failing disk, as a client of a daemon meets it (docs/durability.md)."""

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
@pytest.mark.promise("D7", "F1", "F2")
def test_what_a_daemon_answers_is_true_while_its_disk_fails_once_and_twice(
    project_root: Path, tmp_path: Path
) -> None:
    """Every call in the long run, each 17th in the ordinary one."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "tests.crashlab.wire", "--json"),
            *("--every", "1" if LONG else "17"),
        ],
        cwd=project_root,
        env=preloaded(build(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout[:5000], run.stderr[-5000:])
    rows = json.loads(run.stdout)["wire"]
    for name in FAULTS:
        assert rows[name]["untrue"] == []
    # Without errors nothing was tried.
    assert rows["ENOSPC once"]["errors"]["storage_full"] > 3
    assert rows["EIO once"]["errors"]["storage_error"] > 3
    assert rows["ENOSPC from now on"]["errors"]["outcome_unknown"] > 1
