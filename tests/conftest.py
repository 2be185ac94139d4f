"""What every test may use."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")  # however busy it is


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Everything that touches the database runs on asyncio; `tests/protocol` adds trio."""
    return "asyncio"


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The folder of pyproject.toml."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def corpus(project_root: Path) -> Path:
    """Public transcripts that lie beside the project and are no part of it."""
    folder = project_root.parent / "shared" / "corpus"
    if not folder.is_dir():
        pytest.skip("no corpus beside the project")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what is marked `long`, unless `scripts/test --long` asks for it."""
    if os.environ.get("RECAPD_LONG") == "1":
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="long: run scripts/test --long"))
