"""What these tests stand on: a look at every statement, a crash, and nothing left behind."""

import os
import shutil
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recapd.storage.entry import Entry, encode_entry
from recapd.storage.store import History, Receipt, Replacement, Session, Store, Tokens

Hook = Callable[[sqlite3.Connection, Callable[[], sqlite3.Cursor]], sqlite3.Cursor]


def _database_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "connection_worker" in thread.name}


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Generator[None]:
    """No thread of a database and no descriptor outlives a test (DESIGN.md §4, aiosqlite)."""
    threads, files = _database_threads(), _open_files()
    yield
    for thread in _database_threads() - threads:
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert _open_files() <= files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the store of the test lies; not there yet."""
    return tmp_path / "store"


@pytest.fixture
def hooks() -> dict[str, Hook]:
    """What stands in for a statement, by how that begins."""
    return {}


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch, hooks: dict[str, Hook]) -> list[str]:
    """What SQLite was asked, by every connection that was opened since, in order."""
    statements: list[str] = []

    class Watched(sqlite3.Connection):
        def _make(self, sql: str, make: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
            statements.append(sql)
            for start, hook in list(hooks.items()):
                if sql.startswith(start):
                    return hook(self, make)
            return make()

        def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
            return self._make(sql, partial(super().execute, sql, parameters))

        def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
            return self._make(sql, partial(super().executemany, sql, parameters))

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    return statements


@pytest.fixture
def interfere(statements: list[str], hooks: dict[str, Hook]) -> Callable[[str, Hook | None], None]:
    """Lets a hook stand in for each statement that begins so; None ends that.

    The hook is given the connection, on whose thread it runs, and what makes the statement.
    """

    def interfere(start: str, hook: Hook | None) -> None:
        hooks.pop(start, None)
        if hook is not None:
            hooks[start] = hook

    return interfere


@pytest.fixture
def crash(tmp_path: Path) -> Callable[[Path], Path]:
    """What a kill would leave of an open store right now, as a folder of its own."""
    numbers = iter(range(1000))

    def crash(folder: Path) -> Path:
        copy = tmp_path / f"crashed-{next(numbers)}"
        shutil.copytree(folder, copy)
        (copy / "store.db-shm").unlink(missing_ok=True)
        return copy

    return crash


@pytest.fixture
def compact() -> Callable[..., Awaitable[Session]]:
    """Archives the present history and puts another in its place, as one compaction."""

    async def compact(
        store: Store, session_id: str, operation_id: str, history: Sequence[Entry] = ()
    ) -> Session:
        begun = await store.begin(session_id, Receipt(operation_id, "session.compact", b"")).wait()
        assert isinstance(begun, Session)
        archive = await store.archive(begun, "compaction", operation_id)
        ids = [entry.entry_id + 1 for entry in history]
        change = Replacement(
            operation_id,
            archive,
            History([*map(encode_entry, history)], [], max([begun.next_entry_id, *ids]), Tokens()),
            {},
        )
        replaced = await store.replace(session_id, change, render=lambda _: b"{}").wait()
        assert isinstance(replaced, Session)
        return replaced

    return compact
