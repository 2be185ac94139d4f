"""Rules of the store, each of which can be switched off: whoever looks for violations must find one
then. A harness that nobody has seen fail proves nothing.
"""

import os
import sqlite3
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from recapd.storage import archive, database, sqlite
from recapd.storage.ledger import Ledger


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Mutant:
    """What to change in the process that writes, and in the one that opens what is left."""

    while_writing: Callable[[], None] = _nothing
    while_opening: Callable[[], None] = _nothing


def _without_sync_of(wanted: Callable[[int], bool]) -> Callable[[], None]:
    """The archive's module and the store's see an fsync that spares these descriptors."""

    def install() -> None:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            if not wanted(descriptor):
                real(descriptor)

        setattr(os, "fsync", fsync)  # noqa: B010

    return install


def _path(descriptor: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def _is_archive(descriptor: int) -> bool:
    return stat.S_ISREG(os.fstat(descriptor).st_mode)


def _is_archive_folder(descriptor: int) -> bool:
    return _path(descriptor).parent.name == "archives"


def _is_archives(descriptor: int) -> bool:
    return _path(descriptor).name == "archives"


def _is_parent(descriptor: int) -> bool:
    path = _path(descriptor)
    return (path / "store").is_dir() and not (path / "archives").is_dir()


def _synchronous(level: str) -> Callable[[], None]:
    def install() -> None:
        configure = database.configure

        def weaker(connection: sqlite3.Connection, writer: bool) -> None:
            configure(connection, writer)
            connection.execute(f"PRAGMA synchronous={level}")

        database.configure = weaker

    return install


def _archive_behind_the_commit() -> None:
    """The name of an archive is made when the replacement is there already."""
    rename = os.rename
    waiting: list[tuple[Any, Any]] = []

    def later(source: Any, target: Any) -> None:
        waiting.append((source, target))

    class Os:
        def __getattr__(self, name: str) -> Any:
            return later if name == "rename" else getattr(os, name)

    setattr(archive, "os", Os())  # noqa: B010  # only that module's

    def has_archive(*_: object) -> bool:
        return True

    setattr(sqlite.SqliteStore, "_has_archive", has_archive)  # noqa: B010
    run = Ledger.run

    def run_and_rename(self: Ledger, changes: Any) -> Any:
        result = run(self, changes)
        while waiting:
            source, target = waiting.pop()
            rename(source, target)
            archive.sync_folder(Path(target).parent)
        return result

    setattr(Ledger, "run", run_and_rename)  # noqa: B010


def _removed_before_the_commit() -> None:
    """The archives of a deleted session are removed while the deletion is not committed."""
    delete = Ledger.delete

    def delete_at_once(self: Any, *arguments: Any) -> Any:
        result = delete(self, *arguments)
        removed: list[tuple[str, int]] = getattr(self, "_removed")  # noqa: B009
        for session_id, revision in removed:
            getattr(self, "_unlink")(session_id, revision)  # noqa: B009
        removed.clear()
        return result

    setattr(Ledger, "delete", delete_at_once)  # noqa: B010


def _half_a_replacement() -> None:
    """The generation is committed before the history."""
    replace = Ledger.replace

    def replace_in_two(self: Any, session_id: str, change: Any, render: Any) -> Any:
        result = replace(self, session_id, change, render)
        database: sqlite3.Connection = getattr(self, "_db")  # noqa: B009
        lines: list[Any] = getattr(self, "_lines")  # noqa: B009
        kept = [*lines]
        lines.clear()
        self.flush()
        database.execute("COMMIT")
        database.execute("BEGIN IMMEDIATE")
        lines += kept
        return result

    setattr(Ledger, "replace", replace_in_two)  # noqa: B010


def _nothing_is_settled() -> None:
    def settle(self: Ledger, outcome: bytes, members: dict[str, object]) -> None:
        del self, outcome, members

    setattr(Ledger, "settle", settle)  # noqa: B010


def _nothing_is_swept() -> None:
    def sweep(*_: object) -> int:
        return 0

    setattr(archive, "sweep", sweep)  # noqa: B010


def _named_archives_are_swept() -> None:
    sweep = archive.sweep

    def sweep_all(archives: Path, _: object) -> int:
        return sweep(archives, set())

    setattr(archive, "sweep", sweep_all)  # noqa: B010


MUTANTS: Final[dict[str, Mutant]] = {
    "sync of the archive": Mutant(_without_sync_of(_is_archive)),
    "sync of its folder": Mutant(_without_sync_of(_is_archive_folder)),
    "sync of the folder of folders": Mutant(_without_sync_of(_is_archives)),
    "sync of its parent": Mutant(_without_sync_of(_is_parent)),
    "sync of each commit": Mutant(_synchronous("NORMAL")),
    "sync of the log": Mutant(_synchronous("OFF")),
    "archive before commit": Mutant(_archive_behind_the_commit),
    "commit before removal": Mutant(_removed_before_the_commit),
    "one transaction": Mutant(_half_a_replacement),
    "settling": Mutant(while_opening=_nothing_is_settled),
    "sweeping": Mutant(while_opening=_nothing_is_swept),
    "sparing what is named": Mutant(while_opening=_named_archives_are_swept),
}
