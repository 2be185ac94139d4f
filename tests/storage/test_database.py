"""A database is opened with the settings that the promises rest on, or not at all."""

import errno
import hashlib
import inspect
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import aiosqlite
import anyio
import pytest

from recapd.storage.database import (
    SCHEMA_VERSION,
    Busy,
    Damaged,
    NewerSchema,
    call,
    checkpoint,
    configure,
    connect,
    make_private_file,
    migrate,
    raw,
    storage_error,
)
from recapd.storage.errors import (
    StorageError,
    StorageFull,
    StorageReadonly,
    UnknownSession,
    Unsafe,
)
from recapd.storage.sqlite import open_store
from recapd.storage.store import NewItem, NewSession, Parent, Query, Session

ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)

Hook = Callable[[sqlite3.Connection, Callable[[], sqlite3.Cursor]], sqlite3.Cursor]
Interfere = Callable[[str, Hook | None], None]
Compact = Callable[..., Awaitable[Session]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty database file."""
    make_private_file(tmp_path / "store.db")
    return tmp_path / "store.db"


def contents(folder: Path) -> dict[str, bytes]:
    """What lies there, without SQLite's index of the log, which is made anew at each start."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("store.db-shm", "lock")
    }


async def ask(connection: aiosqlite.Connection, sql: str) -> list[tuple[object, ...]]:
    return await call(connection, lambda: raw(connection).execute(sql).fetchall())


# The door that is not public.


async def test_the_door_to_a_connections_thread_has_the_shape_that_is_relied_on(
    path: Path,
) -> None:
    """`call` and `raw`: aiosqlite is pinned, and this says what to look at when the pin moves."""
    execute = getattr(aiosqlite.Connection, "_execute")  # noqa: B009  # it is private
    assert inspect.iscoroutinefunction(execute)
    kinds = [parameter.kind for parameter in inspect.signature(execute).parameters.values()]
    assert kinds == [
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ]
    connection = await connect(path, writer=True)
    try:
        assert isinstance(raw(connection), sqlite3.Connection)
        first = await call(connection, threading.get_ident)
        assert first == await call(connection, threading.get_ident) != threading.get_ident()
        assert await call(connection, divmod, 7, 2) == (3, 1)
        assert await call(connection, int, "11", base=2) == 3
        with pytest.raises(ZeroDivisionError):
            await call(connection, lambda: 1 // 0)
    finally:
        await connection.close()


async def test_a_cancelled_call_goes_on_as_one_piece(path: Path) -> None:
    """omnilib/aiosqlite#290: a transaction is one function, and never left half made."""
    connection = await connect(path, writer=True)
    begun, proceed = anyio.Event(), threading.Event()

    def transaction() -> None:
        db = raw(connection)
        anyio.from_thread.run_sync(begun.set, token=token)
        assert proceed.wait(5)
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE made (x)")
        db.execute("COMMIT")

    token = anyio.lowlevel.current_token()
    try:
        with anyio.fail_after(5):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call, connection, transaction)
                await begun.wait()
                tasks.cancel_scope.cancel()
            proceed.set()
            assert not await call(connection, lambda: raw(connection).in_transaction)
            assert await ask(connection, "SELECT name FROM sqlite_schema") == [("made",)]
    finally:
        await connection.close()


# Settings.


@pytest.mark.promise("D5")
async def test_a_writer_has_the_settings_that_durability_rests_on(path: Path) -> None:
    """PROMISES.md D5."""
    connection = await connect(path, writer=True)
    try:
        for pragma, value in [
            ("journal_mode", "wal"),
            ("synchronous", 2),
            ("mmap_size", 0),
            ("busy_timeout", 10_000),
        ]:
            assert await ask(connection, f"PRAGMA {pragma}") == [(value,)]
    finally:
        await connection.close()


@pytest.mark.promise("L3")
async def test_a_reader_cannot_write(path: Path) -> None:
    """PROMISES.md L3."""
    await (await connect(path, writer=True)).close()
    connection = await connect(path, writer=False)
    try:
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            await ask(connection, "CREATE TABLE made (x)")
    finally:
        await connection.close()


@pytest.mark.promise("D5")
def test_a_journal_mode_that_does_not_take_is_refused() -> None:
    """PROMISES.md A.3: a database in memory answers `memory`, and a failing disk says as little."""
    db = sqlite3.connect(":memory:")
    with pytest.raises(sqlite3.OperationalError, match="did not take"):
        configure(db, True)
    db.close()


@pytest.mark.promise("D5")
async def test_an_error_while_the_journal_mode_is_switched_is_not_swallowed(
    folder: Path, interfere: Interfere
) -> None:
    """PROMISES.md A.3: it is raised by the fetch."""

    class Fails(sqlite3.Cursor):
        def fetchone(self) -> None:
            raise sqlite3.OperationalError("disk I/O error")

    interfere("PRAGMA journal_mode", lambda connection, _: connection.cursor(Fails))
    with pytest.raises(StorageError):
        async with open_store(folder):
            pass


async def test_any_name_of_a_folder_will_do(tmp_path: Path) -> None:
    """The name becomes part of a URI (sqlite.org/uri.html)."""
    for number, name in enumerate(["a?mode=ro#x", "%41", "a b", "ü", os.fsdecode(b"\xff"), "&"]):
        async with open_store(tmp_path / name) as store:
            await store.create(NewSession(str(number))).wait()
        assert (tmp_path / name / "store.db").exists()
    async with open_store(Path(f"/{tmp_path}/two")) as store:
        assert await store.sessions(Query()) == []


# Versions.


def test_a_new_database_is_brought_to_the_present_version_once(path: Path) -> None:
    """PROMISES.md R8; the id of a store is the same for ever."""
    db = sqlite3.connect(path, isolation_level=None)
    assert migrate(db, "first") == "first"
    assert db.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    tables = db.execute("SELECT name FROM sqlite_schema").fetchall()
    assert migrate(db, "second") == "first"
    assert db.execute("SELECT name FROM sqlite_schema").fetchall() == tables
    assert db.execute("SELECT store_id FROM store").fetchall() == [("first",)]
    db.close()


def test_every_migration_that_is_there_is_made() -> None:
    """A file that nobody runs would be found at the worst of times."""
    names = [path.name for path in files("recapd.storage").joinpath("migrations").iterdir()]
    assert sorted(names) == [f"{number:04}.sql" for number in range(1, SCHEMA_VERSION + 1)]


@pytest.mark.promise("R8")
async def test_the_store_of_an_older_recapd_is_brought_to_the_present_version(
    folder: Path,
) -> None:
    """PROMISES.md R8: sessions of schema 1 were not forked, and are served as they were."""
    async with open_store(folder) as store:
        session = await store.create(NewSession("s"), [ITEM]).wait()
    db = sqlite3.connect(folder / "store.db", isolation_level=None)
    db.execute("ALTER TABLE sessions DROP COLUMN parent")
    db.execute("ALTER TABLE sessions DROP COLUMN auto_compact")
    db.execute("DROP TABLE access_tokens")
    db.execute("PRAGMA user_version = 1")
    older = db.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
    db.close()
    script = files("recapd.storage").joinpath("migrations", "0001.sql").read_text()
    first = sqlite3.connect(":memory:")
    first.executescript(script)
    made = first.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
    first.close()
    assert {" ".join(sql.split()) for (sql,) in older} == {" ".join(sql.split()) for (sql,) in made}
    async with open_store(folder) as store:
        assert await store.session("s") == session
        fork = NewSession("fork", parent=Parent("s", 1))
        made_fork = await store.create(fork).wait()
    async with open_store(folder) as store:
        assert await store.session("fork") == made_fork
        assert (await store.session("fork")).parent == Parent("s", 1)


@pytest.mark.promise("R8")
def test_a_migration_that_fails_leaves_the_database_as_it_was(path: Path) -> None:
    """PROMISES.md R8: each in one transaction."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("CREATE TABLE operations (x)")
    with pytest.raises(sqlite3.OperationalError, match="operations already exists"):
        migrate(db, "store")
    db.execute("ROLLBACK")
    assert db.execute("SELECT name FROM sqlite_schema").fetchall() == [("operations",)]
    assert db.execute("PRAGMA user_version").fetchone() == (0,)
    db.close()


@pytest.mark.promise("R8")
@pytest.mark.parametrize("with_a_log", [False, True])
async def test_the_store_of_a_newer_recapd_is_refused_and_left_as_it_is(
    folder: Path, crash: Callable[[Path], Path], with_a_log: bool
) -> None:
    """PROMISES.md R8; the last to close a database would bring its log in."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
    db = sqlite3.connect(folder / "store.db")
    db.execute("PRAGMA user_version = 99")
    db.execute("INSERT INTO store VALUES ('newer')")
    db.commit()
    newer = crash(folder) if with_a_log else folder
    db.close()
    assert (newer / "store.db-wal").exists() == with_a_log
    before = contents(newer)
    with pytest.raises(NewerSchema):
        async with open_store(newer):
            pass
    after = contents(newer)
    if not with_a_log:
        after.pop("store.db-wal", None)
    assert after == before


# Files.


def modes_below(folder: Path) -> dict[str, int]:
    """The permissions of a folder (`.`) and of all that is in it, by name."""
    modes = {path.name: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*")}
    return {".": stat.S_IMODE(folder.lstat().st_mode), **modes}


@pytest.mark.promise("S1")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_every_file_of_a_store_is_private_whatever_the_umask(
    folder: Path, umask: int, compact: Compact
) -> None:
    """PROMISES.md S1: SQLite alone would make them readable by others."""
    digest = hashlib.sha256(b"s").hexdigest()
    before = os.umask(umask)
    try:
        async with open_store(folder) as store:
            await store.create(NewSession("s"), [ITEM]).wait()
            await compact(store, "s", "o")
            modes = modes_below(folder)
    finally:
        os.umask(before)
    assert modes == {
        ".": 0o700,
        "lock": 0o600,
        "store.db": 0o600,
        "store.db-wal": 0o600,
        "store.db-shm": 0o600,
        "archives": 0o700,
        digest: 0o700,
        "1.jsonl.zst": 0o600,
    }


@pytest.mark.promise("S1")
async def test_a_database_that_others_could_read_is_made_private(folder: Path) -> None:
    """Promise 11: as a copy from a backup may be."""
    async with open_store(folder):
        pass
    (folder / "store.db").chmod(0o644)
    async with open_store(folder):
        modes = modes_below(folder)
    assert {modes[name] for name in ("store.db", "store.db-wal", "store.db-shm")} == {0o600}


@pytest.mark.promise("S4")
@pytest.mark.parametrize(
    "what", ["a link", "a dangling link", "a second name", "a pipe", "a folder"]
)
async def test_what_is_no_plain_file_is_refused_in_place_of_the_database(
    folder: Path, tmp_path: Path, what: str
) -> None:
    """PROMISES.md S4: SQLite itself follows links."""
    elsewhere = tmp_path / "elsewhere"
    async with open_store(folder):
        pass
    path = folder / "store.db"
    path.rename(elsewhere)
    match what:
        case "a link":
            path.symlink_to(elsewhere)
        case "a dangling link":
            path.symlink_to(tmp_path / "nowhere")
        case "a second name":
            path.hardlink_to(elsewhere)
        case "a pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    before = elsewhere.read_bytes()
    with pytest.raises(Unsafe):
        async with open_store(folder):
            pass
    assert elsewhere.read_bytes() == before
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.promise("S1")
def test_another_users_database_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PROMISES.md S1."""
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(Unsafe):
        make_private_file(path)


@pytest.mark.promise("L2", "L3")
async def test_the_database_is_opened_by_sqlite_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROMISES.md L2: closing any other descriptor of it would drop SQLite's locks."""
    async with open_store(folder):
        pass
    opened: list[str] = []
    real = os.open

    def record(path: str | Path, *args: int, **kwargs: int) -> int:
        opened.append(Path(path).name)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", record)
    async with open_store(folder) as store:
        await store.create(NewSession("s")).wait()
    assert "lock" in opened
    assert not any(name.startswith("store.db") for name in opened)


# Damage.


async def damaged_store(folder: Path, compact: Compact) -> None:
    """A store, closed, of a session `s` one of whose pages is junk, and of an intact one `t`."""
    async with open_store(folder) as store:
        await store.create(NewSession("t"), [ITEM]).wait()
        long = NewItem(b'{"content":"%b"}' % (b"x" * 3000), 750)
        await store.create(NewSession("s"), [long] * 200).wait()
    with (folder / "store.db").open("r+b") as file:
        pages = os.fstat(file.fileno()).st_size // 4096
        for page in range(pages // 2, pages // 2 + 20):
            file.seek(page * 4096)
            file.write(b"\xa5" * 4096)


@pytest.mark.promise("R5")
async def test_a_damaged_database_is_told_at_first_touch_and_not_written_to_any_more(
    folder: Path, compact: Compact
) -> None:
    """BUGLOG B66: a clear error, no further writes, nothing "repaired" silently."""
    await damaged_store(folder, compact)
    before = (folder / "store.db").read_bytes()
    with anyio.fail_after(10):
        async with open_store(folder) as store:
            assert not (await store.health()).damaged
            with pytest.raises(Damaged):
                await store.page("s", limit=1000, bytes_max=1 << 24)
            health = await store.health()
            assert (health.damaged, health.writable) == (True, False)
            for _ in range(3):
                with pytest.raises(Damaged):
                    await store.append("t", [ITEM]).wait()
            assert (await store.session("t")).entries == 1
            with pytest.raises(UnknownSession):
                await store.session("u")
    assert (folder / "store.db").read_bytes() == before


async def test_a_log_is_not_brought_into_a_database_that_was_found_damaged(
    folder: Path, compact: Compact
) -> None:
    """BUGLOG B66: closing writes nothing, either; what the log holds stays there."""
    await damaged_store(folder, compact)
    async with open_store(folder) as store:
        await store.append("t", [ITEM]).wait()
        with pytest.raises(Damaged):
            await store.page("s", limit=1000, bytes_max=1 << 24)
        before = contents(folder)
    assert before["store.db-wal"] != b""
    assert contents(folder) == before


async def test_an_archive_of_a_damaged_history_is_not_made(folder: Path, compact: Compact) -> None:
    """Promise 3: the original is there first, or nothing is replaced."""
    await damaged_store(folder, compact)
    async with open_store(folder) as store:
        with pytest.raises(Damaged):
            await store.archive(await store.session("s"), "compaction", "o")
        assert list((folder / "archives").rglob("*.zst")) == []
        with pytest.raises(Damaged):
            await store.append("s", [ITEM]).wait()


@pytest.mark.promise("R5")
@pytest.mark.parametrize("offset", [0, 16, 100])
async def test_a_damaged_first_page_stops_the_start_and_everything_stays(
    folder: Path, offset: int
) -> None:
    """PROMISES.md R5."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM]).wait()
    with (folder / "store.db").open("r+b") as file:
        file.seek(offset)
        file.write(b"\xa5" * 50)
    before = contents(folder)
    with pytest.raises(Damaged):
        async with open_store(folder):
            pass
    assert contents(folder) == before


async def test_entries_that_are_missing_are_damage_and_no_shorter_history(folder: Path) -> None:
    """Promise 5: never something else instead."""
    async with open_store(folder) as store:
        await store.create(NewSession("s"), [ITEM] * 10).wait()
    db = sqlite3.connect(folder / "store.db")
    db.execute("DELETE FROM entries WHERE position & 4294967295 = 7")
    db.commit()
    db.close()
    async with open_store(folder) as store:
        page = await store.page("s", limit=5, bytes_max=1 << 20)
        assert len(page.entries) == 5
        with pytest.raises(Damaged):
            await store.page("s", limit=100, bytes_max=1 << 20)
    async with open_store(folder) as store:
        with pytest.raises(Damaged):
            await store.archive(await store.session("s"), "compaction", "o")
    async with open_store(folder) as store:
        with pytest.raises(Damaged):
            await store.page("s", limit=100, bytes_max=1 << 20, order="desc")


# Other processes.

WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("begun", flush=True)
sys.stdin.read()
db.execute("ROLLBACK")
"""


@contextmanager
def another_writer(path: Path) -> Generator[Callable[[], None]]:
    """A process that has begun to write; gives what makes it end."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield process.stdin.close


async def test_a_change_waits_for_a_writer_of_another_process(
    folder: Path, interfere: Interfere
) -> None:
    """BUGLOG B40: it waits and succeeds."""
    asked = anyio.Event()
    token = anyio.lowlevel.current_token()

    def begin(_: sqlite3.Connection, make: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        anyio.from_thread.run_sync(asked.set, token=token)
        return make()

    with anyio.fail_after(20):
        async with open_store(folder) as store:
            await store.create(NewSession("s")).wait()
            interfere("BEGIN IMMEDIATE", begin)
            with another_writer(folder / "store.db") as end:
                pending = store.append("s", [ITEM])
                await asked.wait()
                assert (await store.session("s")).entries == 0  # reads do not wait
                assert not pending.done
                end()
                await pending.wait()
            assert (await store.session("s")).entries == 1


async def test_a_writer_that_does_not_end_is_an_error_once_for_all_that_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch, statements: list[str]
) -> None:
    """BUGLOG B40: an error to the caller, never OK without the row; nobody waits his turn twice."""
    monkeypatch.setattr("recapd.storage.database._BUSY_TIMEOUT_MS", 30)
    async with open_store(folder) as store:
        await store.create(NewSession("s")).wait()
        other = sqlite3.connect(folder / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        statements.clear()
        with anyio.fail_after(5):
            for pending in [store.append("s", [ITEM]) for _ in range(20)]:
                with pytest.raises(Busy):
                    await pending.wait()
        assert statements.count("BEGIN IMMEDIATE") == 1
        other.execute("ROLLBACK")
        other.close()
        assert (await store.session("s")).entries == 0
        await store.append("s", [ITEM]).wait()


async def test_a_checkpoint_that_does_not_wait_gives_way_to_a_reader(path: Path) -> None:
    """PROMISES.md F7: appends do not stand behind the log's being put away."""
    connection = await connect(path, writer=True)
    try:
        db = raw(connection)
        await ask(connection, "CREATE TABLE made (x)")
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM made").fetchall()
        await ask(connection, "INSERT INTO made VALUES (1)")
        with anyio.fail_after(5):
            assert not await call(connection, checkpoint, db, "TRUNCATE", wait=False)
        assert await ask(connection, "PRAGMA busy_timeout") == [(10_000,)]
        reader.close()
        assert await call(connection, checkpoint, db, "TRUNCATE", wait=True)
        assert path.with_name("store.db-wal").stat().st_size == 0
    finally:
        await connection.close()


# What errors mean.


def sqlite_error(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("text")
    error.sqlite_errorcode = code
    error.sqlite_errorname = "NAME"
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, ""), StorageFull),
        (OSError(errno.EDQUOT, ""), StorageFull),
        (OSError(errno.EFBIG, ""), StorageFull),
        (OSError(errno.EROFS, ""), StorageReadonly),
        (OSError(errno.EACCES, ""), StorageReadonly),
        (OSError(errno.EIO, ""), StorageError),
        (OSError("without a number"), StorageError),
        (sqlite_error(sqlite3.SQLITE_FULL), StorageFull),
        (sqlite_error(sqlite3.SQLITE_READONLY_DBMOVED), StorageReadonly),
        (sqlite_error(sqlite3.SQLITE_IOERR_WRITE), StorageError),
        (sqlite_error(sqlite3.SQLITE_BUSY_RECOVERY), Busy),
        (sqlite_error(sqlite3.SQLITE_CORRUPT_VTAB), Damaged),
        (sqlite_error(sqlite3.SQLITE_NOTADB), Damaged),
        (sqlite3.ProgrammingError("Python's own"), StorageError),
        (MemoryError(), StorageError),
        (Damaged("itself"), Damaged),
    ],
)
def test_an_error_says_what_it_means_and_nothing_of_its_text(
    error: Exception, kind: type[StorageError]
) -> None:
    """Promises 12 and 13: a clear error, without paths or exception text."""
    judged = storage_error(error)
    assert type(judged) is kind
    assert "text" not in str(judged)


async def test_a_store_that_cannot_be_written_to_is_refused(
    folder: Path, tmp_path: Path, interfere: Interfere
) -> None:
    """PROMISES.md F3."""

    def fail(_: sqlite3.Connection, make: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        raise sqlite_error(sqlite3.SQLITE_READONLY)

    interfere("PRAGMA journal_mode", fail)
    with pytest.raises(StorageReadonly):
        async with open_store(folder):
            pass


async def test_what_is_there_of_a_first_start_that_died_is_no_obstacle(
    folder: Path, tmp_path: Path
) -> None:
    """PROMISES.md R2: it may have died in between any two files."""
    async with open_store(folder):
        pass
    for kept in (["lock"], ["lock", "store.db"], ["archives"]):
        part = tmp_path / "-".join(kept)
        part.mkdir(mode=0o700)
        for name in kept:
            if name == "archives":
                shutil.copytree(folder / name, part / name)
            else:
                (part / name).touch(mode=0o600)
        async with open_store(part) as store:
            await store.create(NewSession("s")).wait()
