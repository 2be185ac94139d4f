"""scripts/bench: what it prints is read by other programs."""

import json
import subprocess
import sys
from pathlib import Path


def test_each_measurement_of_the_dispatcher_is_there(project_root: Path) -> None:
    usage = subprocess.run(
        [project_root / "scripts/bench", "nothing"], capture_output=True, text=True, check=False
    )
    assert usage.returncode == 2
    for name in ("[table]", "retention", "overhead", "redaction"):
        assert f"scripts/bench {name} [--json]" in usage.stderr
        assert (project_root / f"scripts/{name.strip('[]')}.py").is_file()


def measure(project_root: Path, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=project_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_table_has_every_figure_beside_a_goal(project_root: Path) -> None:
    """One small round of everything: what it measures is not looked at, but that it does."""
    printed = measure(project_root, "scripts.table", "--quick", "--repeats", "1", "--json")
    report = json.loads(printed)
    assert report.keys() == {"rows"}
    rows = {row["name"]: row for row in report["rows"]}
    rows.pop("append_fsyncs", None)  # it needs strace
    assert rows.keys() == {
        *("append_median", "append_against_commit", "append_p99", "append_100_sessions"),
        *("append_100_items", "read_10k", "list_10k", "list_100k", "compact_200", "compact_10k"),
        *("ping", "ping_pipelined", "flood_lost", "start", "memory_idle", "memory_1000_sessions"),
        *("append_beside", "stall", "memory_300_mb", "append_long", "disk_growth"),
    }
    for row in rows.values():
        assert row.keys() == {"name", "value", "unit", "reference", "ratio", "goal", "met"}
        assert row["goal"].startswith(("ratio <= ", "ratio >= ", "value <= ", "value >= "))
        figure = row[row["goal"].split()[0]]
        assert isinstance(figure, float | int)
        assert isinstance(row["met"], bool)
    assert rows["flood_lost"]["value"] == 0
    assert rows["flood_lost"]["met"]


def test_the_table_says_which_figures_there_are_not(project_root: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "scripts.table", "--only", "nothing"],
        cwd=project_root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "there is no row or workload nothing" in run.stderr


def test_retention_prints_shares_of_one_and_reaches_its_goals(project_root: Path) -> None:
    report = json.loads(measure(project_root, "scripts.retention", "--no-corpus", "--json"))
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
    printed = measure(project_root, "scripts.retention", "--no-corpus")
    lines = [line.split() for line in printed.splitlines()]
    found = {line[0]: int(line[2]) for line in lines if len(line) > 2 and line[2].isdecimal()}
    assert found["written_paths"] > 15
    assert found["commands_with_status"] > 25
    rounds = [line for line in lines if line and line[0].isdecimal() and line[1].isdecimal()]
    assert [int(line[0]) for line in rounds[-15:]] == [*range(1, 16)]
    assert all(int(line[1]) <= 20_000 and int(line[2]) <= 11 for line in rounds[-15:])


def test_overhead_prints_the_whole_and_its_parts(project_root: Path) -> None:
    printed = measure(project_root, "scripts.overhead", "--json", "--items", "20")
    by_kind = json.loads(printed)["overhead_ms"]["20"]
    assert by_kind.keys() == {"offline", "chat", "parts"}
    assert by_kind["parts"].keys() == {
        *("read", "divide", "render", "count", "evidence", "archive", "commit"),
    }
    assert all(part > 0 for part in by_kind["parts"].values())
    assert by_kind["offline"]["whole"] > by_kind["offline"]["request"] == 0
    assert by_kind["chat"]["whole"] > by_kind["chat"]["request"] > 0


def test_redaction_misses_few_planted_secrets_and_takes_nothing_else_for_one(
    project_root: Path,
) -> None:
    report = json.loads(measure(project_root, "scripts.redaction", "--no-corpus", "--json"))
    found = report["redaction"]
    assert found["shapes"] >= 50
    misses = found["misses"]
    assert (misses["sentence"], misses["json"], misses["env"]) == (0, 0, 0)
    assert misses["url"] <= 4
    assert misses["broken"] > 0  # what is measured can be missed
    assert found["false_hits"] == []
    assert found["megabytes_per_s"] > 0
