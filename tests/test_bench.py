"""scripts/bench: what it prints is read by other programs."""

import json
import subprocess
import sys
from pathlib import Path


def test_each_measurement_of_the_dispatcher_is_there(project_root: Path) -> None:
    usage = subprocess.run(
        [project_root / "scripts/bench"], capture_output=True, text=True, check=False
    )
    assert usage.returncode == 2
    assert "scripts/bench retention [--json]" in usage.stderr
    assert (project_root / "scripts/retention.py").is_file()


def test_retention_prints_shares_of_one_and_reaches_its_goals(project_root: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "scripts.retention", "--json", "--no-corpus"],
        cwd=project_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    retention = report["retention"]
    assert {
        *("last_request", "written_paths", "read_paths", "commands", "commands_with_status"),
        *("urls", "numbers"),
    } <= retention.keys()
    assert all(0 <= share <= 1 for share in retention.values())
    assert retention["last_request"] == 1
    assert retention["written_paths"] >= 0.95
    assert retention["commands_with_status"] >= 0.8
    assert report["facts"]["written_paths"]["of"] > 15  # the measure itself finds something
    assert report["facts"]["commands_with_status"]["of"] > 25
    assert (report["histories"], report["refused"]) == (10, [])
    assert len(report["rounds"]) == 15
    assert all(one["tokens"] <= report["context_limit"] for one in report["rounds"])
