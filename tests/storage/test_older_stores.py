"""Stores that earlier versions of recapd made: each opens with all that was in it.

`tests/data/stores/schema-N` was written by the code of its time, which also wrote down what it
showed; `left` has a compaction that was running when its process ended.
"""

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recapd.storage.database import SCHEMA_VERSION
from recapd.storage.sqlite import open_store
from recapd.storage.store import Query

STORES = Path(__file__).parent.parent / "data" / "stores"


@pytest.fixture(params=sorted(path.name for path in STORES.iterdir()))
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one of them, as private as the store was."""
    folder = tmp_path / "store"
    shutil.copytree(STORES / request.param, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


@pytest.mark.promise("R8")
async def test_everything_of_an_older_store_is_there(older: Path) -> None:
    expected: Any = json.loads((older / "expected.json").read_text("utf-8"))
    async with open_store(older) as store:
        sessions = await store.sessions(Query(sort="session_id", order="asc"))
        assert [one.session_id for one in sessions] == [
            one["session_id"] for one in expected["sessions"]
        ]
        for session, was in zip(sessions, expected["sessions"], strict=True):
            shown = msgspec.to_builtins(session)
            if session.session_id == "left":
                assert (was["running"], session.running) == ("compact-2", None)
                was |= {"running": None, "seq": was["seq"] + 1}
            assert {name: shown[name] for name in was} == {
                name: tuple(value) if name == "archived_revisions" else value
                for name, value in was.items()
            }
            assert (await store.verify(session.session_id, read=lambda _: True)).faults == []
            for revision, lines in expected["histories"][session.session_id].items():
                page = await store.page(
                    session.session_id, revision=int(revision), limit=100, bytes_max=1 << 20
                )
                assert [line.decode() for line in page.entries] == lines
        events = [
            [event.ordinal, event.session_id, event.seq, event.method, event.body.decode()]
            for event in await store.events_of_all(after_ordinal=0, limit=1000)
        ]
        assert events[: len(expected["events"])] == expected["events"]
        for operation_id, outcome in expected["operations"].items():
            assert (await store.operation(operation_id)).outcome == outcome.encode()
        assert [
            [
                *(token.token_id, token.digest.hex(), token.label, [*token.scopes]),
                *([*(token.sessions or ())], token.parent),
                *(token.created_at_ms, token.expires_at_ms),
            ]
            for token in await store.tokens()
        ] == expected.get("tokens", [])


@pytest.mark.parametrize("version", range(1, SCHEMA_VERSION + 1))
def test_there_is_a_store_of_each_schema(version: int) -> None:
    """Whoever makes a new schema adds a store of it here."""
    path = STORES / f"schema-{version}" / "store.db"
    database = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    assert database.execute("PRAGMA user_version").fetchone() == (version,)
    database.close()
