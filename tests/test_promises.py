"""docs/durability.md: each promise has a test, and none was dropped."""

import re
from pathlib import Path

import pytest

ROW = re.compile(r"^\| ([A-Z]\d+) \| .+? \|([^|]*)\|$", re.M)


def test_each_promise_has_a_test(project_root: Path) -> None:
    rows = ROW.findall((project_root / "docs/durability.md").read_text("utf-8"))
    assert [id for id, tests in rows if not tests.strip()] == []
    for _, tests in rows:
        for name in re.findall(r"`([^`]+)`", tests):
            assert (project_root / "tests" / name).is_file()


def test_no_promise_was_dropped(project_root: Path) -> None:
    agreed = project_root.parent / "shared/PROMISES.md"
    if not agreed.is_file():
        pytest.skip("the page that was agreed on is not here")
    rows = ROW.findall((project_root / "docs/durability.md").read_text("utf-8"))
    ids = re.findall(r"^\| ([A-Z]\d+) \|", agreed.read_text("utf-8"), re.M)
    assert [id for id, _ in rows if id in ids] == ids  # others were added
