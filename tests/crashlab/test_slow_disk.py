"""A disk that takes long to sync holds up the writer only (PROMISES.md F7)."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.crashlab.shim import NEEDS_GCC, build, preloaded
from tests.crashlab.slow_disk import READS


@NEEDS_GCC
@pytest.mark.promise("F7")
def test_reads_of_other_sessions_do_not_wait_for_a_slow_sync(
    project_root: Path, tmp_path: Path
) -> None:
    """A change was handed over before them, and is durable only after them."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.crashlab.slow_disk", str(tmp_path / "store")],
        cwd=project_root,
        env=preloaded(build(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    assert run.stdout.split("\n")[:-1] == [*["read"] * READS, "made", "delayed"]
