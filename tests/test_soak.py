"""scripts/soak: a sample of it, bounded by operations; the hour is for `scripts/soak` itself."""

import json
import subprocess
import sys
from pathlib import Path


def test_everything_at_once_leaves_nothing_behind(project_root: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "scripts.soak", "--operations", "300", "--json"],
        cwd=project_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stderr == ""
    report = json.loads(run.stdout)["soak"]
    counts = report["counts"]
    assert report["faults"] == {}
    assert run.returncode == 0, report["figures"]
    for kind in ("append", "compact", "chat", "restore", "rewind", "fork", "export", "get"):
        assert counts[kind] > 0, kind
    assert counts["operations"] >= 300
    assert counts["events"] > counts["append"]
    assert min(counts["verified"], counts["came and went"], counts["slow readers"]) > 0
