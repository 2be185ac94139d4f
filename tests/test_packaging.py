"""How the parts may depend on each other, and what is packed."""

import ast
import os
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

PARTS = ("daemon", "protocol", "storage")
MAY_IMPORT = {
    "daemon": {"daemon", "protocol", "storage"},
    "protocol": {"protocol"},
    "storage": {"storage"},
}


def imported_names(source: str) -> Iterator[str]:
    """Every module that the source imports, wherever; a relative import begins with its dots."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def part_of(module: str) -> str:
    """The part that a module of recapd belongs to; empty for other modules and recapd itself."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "recapd" else ""


def test_the_reader_of_imports_sees_every_form() -> None:
    """Otherwise the tests below could not fail."""
    source = "import a.b as c\nfrom recapd import storage\ndef f():\n    from . import d\n"
    names = set(imported_names(source))
    assert names == {"a.b", "recapd", "recapd.storage", ".", "..d"}
    assert {part_of(name) for name in names} == {"", "storage"}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_it_may_know(project_root: Path, part: str) -> None:
    """protocol and storage know nothing of each other or of the daemon (ARCHITECTURE)."""
    files = python_files(project_root / part)
    assert files
    for path in files:
        known = {part_of(name) for name in imported_names(path.read_text("utf-8"))} - {""}
        assert known <= MAY_IMPORT[part], path


@pytest.mark.parametrize("folder", [*PARTS, "tests", "scripts", "src"])
def test_imports_are_absolute_and_under_recapd(project_root: Path, folder: str) -> None:
    """`import daemon` would find another project's package once recapd is installed."""
    for path in python_files(project_root / folder):
        for name in imported_names(path.read_text("utf-8")):
            assert name.partition(".")[0] not in {"", *PARTS}, path


@pytest.mark.parametrize("part", PARTS)
def test_the_package_shows_the_top_level_folders(project_root: Path, part: str) -> None:
    link = project_root / "src" / "recapd" / part
    assert os.readlink(link) == f"../../{part}"


def test_package_data_is_where_the_code_looks_for_it() -> None:
    package = resources.files("recapd")
    for name in ("py.typed", "daemon/compaction/o200k_base.xz"):
        assert package.joinpath(name).is_file(), name


def test_every_data_file_has_a_pattern_in_the_package_data(project_root: Path) -> None:
    """A kind of file without one would be missing in the wheel only."""
    pyproject = tomllib.loads((project_root / "pyproject.toml").read_text("utf-8"))
    patterns: list[str] = pyproject["tool"]["setuptools"]["package-data"]["*"]
    suffixes = {Path(pattern).suffix for pattern in patterns}
    for part in PARTS:
        for path in (project_root / part).rglob("*.*"):
            assert path.suffix in suffixes | {".py", ".pyc"}, path


def test_constraints_pin_versions_and_name_no_address(project_root: Path) -> None:
    lines = (project_root / "constraints.txt").read_text("utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert len(pinned) > 20
    for line in pinned:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line), line


def test_everything_that_is_installed_for_tests_is_pinned(project_root: Path) -> None:
    pyproject = tomllib.loads((project_root / "pyproject.toml").read_text("utf-8"))
    wanted: list[str] = [
        *pyproject["build-system"]["requires"],
        *pyproject["project"]["dependencies"],
        *pyproject["project"]["optional-dependencies"]["uvloop"],
        *pyproject["dependency-groups"]["dev"],
    ]
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (project_root / "constraints.txt").read_text("utf-8").splitlines()
    }
    for requirement in wanted:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert name is not None
        assert name[0].lower().replace("_", "-") in pinned
