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


def retention(project_root: Path, *options: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "scripts.retention", "--no-corpus", *options],
        cwd=project_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_retention_prints_shares_of_one_and_reaches_its_goals(project_root: Path) -> None:
    report = json.loads(retention(project_root, "--json"))
    assert report.keys() == {"retention"}
    shares = report["retention"]
    assert {
        *("last_request", "written_paths", "read_paths", "commands", "commands_with_status"),
        *("urls", "numbers"),
    } <= shares.keys()
    assert all(0 <= share <= 1 for share in shares.values())
    assert shares["last_request"] == 1
    assert shares["written_paths"] >= 0.95
    assert shares["commands_with_status"] >= 0.8


def test_retention_prints_what_it_found_and_every_round(project_root: Path) -> None:
    """The measure itself finds something, and the size stays bounded."""
    lines = [line.split() for line in retention(project_root).splitlines()]
    found = {line[0]: int(line[2]) for line in lines if len(line) > 2 and line[2].isdecimal()}
    assert found["written_paths"] > 15
    assert found["commands_with_status"] > 25
    rounds = [line for line in lines if line and line[0].isdecimal() and line[1].isdecimal()]
    assert [int(line[0]) for line in rounds[-15:]] == [*range(1, 16)]
    assert all(int(line[1]) <= 20_000 and int(line[2]) <= 11 for line in rounds[-15:])
