"""Opening SQLite, calling it, and saying what its errors mean.

There is one read-write connection, and it alone checkpoints: in SQLite before 3.51.3 two
connections that write or checkpoint at once can corrupt the file (the WAL-reset bug,
sqlite.org/wal.html). Readers are `query_only`.
"""

import errno
import os
import sqlite3
import stat
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, ParamSpec, TypeVar
from urllib.parse import quote

import aiosqlite
import anyio

from recapd.storage.errors import StorageError, StorageFull, StorageReadonly
from recapd.storage.lock import check_private

P = ParamSpec("P")
T = TypeVar("T")

_BUSY_TIMEOUT_MS: Final = 10_000  # another process that holds the lock longer is an error
_WAL_BYTES_MAX: Final = 16 << 20  # the log is cut back to this when a checkpoint could reset it
_MIGRATIONS: Final = ("0001.sql", "0002.sql", "0003.sql")  # the n-th brings it to user_version n
SCHEMA_VERSION: Final = len(_MIGRATIONS)


class Damaged(StorageError):
    """The database is not what SQLite wrote. Nothing is written to it any more."""


class Busy(StorageError):
    """Another process holds the database for longer than can be waited."""


class NewerSchema(StorageError):
    """The database was made by a newer recapd."""


async def call(
    connection: aiosqlite.Connection, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `function` on the connection's own thread, as one piece.

    aiosqlite's public calls are one statement each, so that a cancel between two of them would
    leave a transaction open (omnilib/aiosqlite#290). This is the door they all go through; it is
    not public, so the version is pinned and a test pins its shape. A cancelled caller does not stop
    the function.

    Raises what `function` raises; Damaged where Python cannot read what SQLite says as text.
    """
    execute: Callable[..., Any] = connection._execute  # pyright: ignore  # see above
    try:
        result: T = await execute(function, *args, **kwargs)
    except UnicodeDecodeError as error:  # sqlite3 lets it through, even of its own errors' text
        raise storage_error(error) from error
    return result


def raw(connection: aiosqlite.Connection) -> sqlite3.Connection:
    """The sqlite3 connection; only for use within `call`."""
    return connection._conn  # pyright: ignore[reportPrivateUsage]  # see `call`


def make_private_file(path: Path) -> None:
    """Make an empty file, or take it over: afterwards it is ours and has mode 0600.

    A link is refused, since SQLite would follow it, and so is a file with a second name. SQLite
    gives `-wal` and `-shm` the same mode.

    Raises Unsafe, OSError.
    """
    try:
        status = check_private_file(path)
    except FileNotFoundError:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(path, flags, 0o600))
        return
    if stat.S_IMODE(status.st_mode) != 0o600:
        path.chmod(0o600)


def check_private_file(path: Path) -> os.stat_result:
    """What lies there, if it is a plain file of ours with one name.

    Raises Unsafe, OSError (FileNotFoundError when there is nothing).
    """
    status = path.lstat()
    check_private(path.name, status)
    return status


async def connect(path: Path, *, writer: bool) -> aiosqlite.Connection:
    """Open a connection with autocommit and the settings that the promises rest on.

    Raises:
        NewerSchema: and nothing was changed.
        sqlite3.Error: it cannot be opened, or a setting did not take.
    """
    uri = _uri(path, "rw" if writer else "ro")
    connection = aiosqlite.connect(uri, uri=True, isolation_level=None)
    with anyio.CancelScope(shield=True):  # a connection that nobody gets has a live thread
        await connection
        try:
            await call(connection, configure, raw(connection), writer)
        except BaseException:
            await connection.close()
            raise
    return connection


def connect_here(path: Path, *, writer: bool) -> sqlite3.Connection:
    """Open a connection for the calling thread, with the settings that a reader has.

    One that is no writer's is opened read-only: it neither writes nor checkpoints, not when it is
    closed as the last one either. So a process beside the daemon may read the live database.

    Raises NewerSchema, sqlite3.Error.
    """
    connection = sqlite3.connect(
        _uri(path, "rw" if writer else "ro"), uri=True, isolation_level=None
    )
    try:
        configure(connection, writer=False)
        if writer:
            connection.execute("PRAGMA query_only=OFF").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _uri(path: Path, mode: str) -> str:
    return f"file://{quote(os.fsencode(path.absolute()))}?mode={mode}"


def configure(connection: sqlite3.Connection, writer: bool) -> None:
    """Make the settings; see `connect`. On the connection's thread."""

    def value(pragma: str) -> object:
        # Fetched, since an error while switching is raised by the fetch and not by execute().
        row = connection.execute(f"PRAGMA {pragma}").fetchone()
        return row[0] if row else None

    value(f"busy_timeout={_BUSY_TIMEOUT_MS}")
    _check_version(connection)
    if not writer:
        value("query_only=ON")
        return
    value("synchronous=FULL")
    if (
        value("journal_mode=WAL") != "wal"
        or value("synchronous") != 2
        or value("mmap_size=0") not in (0, None)  # None: built without
        or value(f"journal_size_limit={_WAL_BYTES_MAX}") != _WAL_BYTES_MAX
    ):
        raise sqlite3.OperationalError("a setting did not take")


def _check_version(connection: sqlite3.Connection) -> int:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise NewerSchema(f"schema {version}, this recapd knows {SCHEMA_VERSION}")
    return int(version)


async def refuse_newer(path: Path) -> None:
    """Refuse the database of a newer recapd by a connection that cannot change it.

    The last read-write connection brings the log into the database when it is closed, whatever it
    was opened for. Without a log, `connect` sees to it. Raises NewerSchema, sqlite3.Error.
    """
    if path.with_name(f"{path.name}-wal").exists():
        try:
            connection = await connect(path, writer=False)
        except sqlite3.OperationalError as error:
            # The first start was cut short while it switched to the log, which nobody used yet; the
            # writer takes that back. (What Python raises itself has no code.)
            if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_READONLY_ROLLBACK:
                raise
        else:
            await connection.close()


def migrate(connection: sqlite3.Connection, store_id: str) -> str:
    """Bring the database to SCHEMA_VERSION, each step in one transaction. On its thread.

    Returns the store's id: `store_id`, unless it had one. Raises NewerSchema, sqlite3.Error.
    """
    version = _check_version(connection)
    for number, name in enumerate(_MIGRATIONS[version:], start=version + 1):
        script = files("recapd.storage").joinpath("migrations", name).read_text("utf-8")
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {number};\nCOMMIT;"
        )
    found = connection.execute("SELECT store_id FROM store").fetchone()
    if found is not None:
        return str(found[0])
    connection.execute("INSERT INTO store (store_id) VALUES (?)", (store_id,))
    return store_id


def checkpoint(
    connection: sqlite3.Connection, extent: Literal["FULL", "TRUNCATE"], *, wait: bool
) -> bool:
    """Bring the log into the database, synced; TRUNCATE also makes the log empty. On its thread.

    False: somebody reads from the log, for longer than can be waited if it is to `wait`.
    Raises sqlite3.Error.
    """
    connection.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS if wait else 0}").fetchall()
    try:
        busy, _, _ = connection.execute(f"PRAGMA wal_checkpoint({extent})").fetchone()
    finally:
        connection.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}").fetchall()
    return not busy


_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READONLY: Final = {errno.EROFS, errno.EACCES, errno.EPERM}


def storage_error(error: Exception) -> StorageError:
    """What an error of SQLite or of the disk means to a caller (sqlite.org/rescode.html)."""
    match error:
        case StorageError():
            return error
        case UnicodeDecodeError():
            return Damaged("text is not what was written")
        case OSError(errno=int(number)):
            text = os.strerror(number)
            if number in _FULL:
                return StorageFull(text)
            return StorageReadonly(text) if number in _READONLY else StorageError(text)
        case sqlite3.Error():
            # Python's own sqlite3 errors have neither.
            name = getattr(error, "sqlite_errorname", type(error).__name__)
            match getattr(error, "sqlite_errorcode", 0) & 0xFF:
                case sqlite3.SQLITE_FULL:
                    return StorageFull(name)
                case sqlite3.SQLITE_READONLY:
                    return StorageReadonly(name)
                case sqlite3.SQLITE_BUSY:
                    return Busy(name)
                case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                    return Damaged(name)
                case _:
                    return StorageError(name)
        case _:
            return StorageError(type(error).__name__)
