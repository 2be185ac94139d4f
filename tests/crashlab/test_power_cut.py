"""The power is cut at every moment of a run of the real store (docs/durability.md)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.crashlab.mutants import MUTANTS
from tests.crashlab.shim import NEEDS_GCC, build, preloaded

LONG = os.environ.get("RECAPD_LONG") == "1"


@NEEDS_GCC
@pytest.mark.timeout(3600)
@pytest.mark.promise("D1", "D2", "D3", "D4", "D10", "R1", "R2", "R3", "R6", "R8")
def test_no_cut_of_the_power_loses_or_halves_anything(project_root: Path, tmp_path: Path) -> None:
    """What `scripts/crashlab` does: with --sample, or all of it in the long run.

    One test, since all of it comes from one run.
    """
    options = ["--json"] if LONG else ["--sample", "--json"]
    run = subprocess.run(
        [sys.executable, "-m", "tests.crashlab.explore", *options],
        cwd=project_root,
        env=preloaded(build(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, (run.stdout[:5000], run.stderr[-5000:])
    printed = json.loads(run.stdout)
    rows = printed["crashlab"]
    story, upgrade = rows["the story"], rows["the upgrade"]
    assert story["violations"] == upgrade["violations"] == 0
    assert story["distinct"] >= (20_000 if LONG else 2_000)
    assert story["went_on"] > 10
    assert story["second"] > 100
    assert upgrade["distinct"] > 20
    # A harness that nobody has seen fail proves nothing.
    for rule in MUTANTS:
        assert rows[f"without {rule}"]["violations"] > 0, rule
    # One sync of the log for a change; one of the file and one of its folder for an archive.
    assert set(printed["syncs"]["commits"]) == {1}
    assert set(printed["syncs"]["archives"]) == {2}
