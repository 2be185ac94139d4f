"""Opening SQLite, calling it, and saying what its errors mean.

There is one read-write connection, and it alone checkpoints: in SQLite before 3.51.3 two connections that write
or checkpoint at once can corrupt the file (the WAL-reset bug, sqlite.org/wal.html). Readers are `query_only`.
"""

import errno
import os
import sqlite3
import stat
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Final, ParamSpec, TypeVar
from urllib.parse import quote

import aiosqlite

from recapd.storage.errors import StorageError, StorageFull, StorageReadonly

P = ParamSpec("P")
T = TypeVar("T")

_BUSY_TIMEOUT_MS: Final = (
    10_000  # another process that holds the lock this long is an error to the caller
)
_WAL_BYTES_MAX: Final = (
    16 << 20
)  # the log is cut back to this after a checkpoint that could reset it
_MIGRATIONS: Final = ("0001.sql",)  # in order; the n-th brings a database to user_version n
SCHEMA_VERSION: Final = len(_MIGRATIONS)


class Damaged(StorageError):
    """The database is not what SQLite wrote. Nothing is written to it any more."""


class NewerSchema(StorageError):
    """The database was made by a newer recapd."""


class Unsafe(StorageError):
    """A file or folder of the store is not what it must be: a link, another's, or open to others."""


async def call(
    connection: aiosqlite.Connection, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run `function` on the connection's own thread, as one piece.

    aiosqlite's public calls are one statement each, so that a cancel between two of them would leave a
    transaction open (omnilib/aiosqlite#290). This is the door they all go through; it is not public, so the
    version is pinned and a test pins its shape. A cancelled caller does not stop the function.
    """
    result: T = await connection._execute(function, *args, **kwargs)  # pyright: ignore  # see above
    return result


def raw(connection: aiosqlite.Connection) -> sqlite3.Connection:
    """The sqlite3 connection; only for use within `call`."""
    return connection._conn  # pyright: ignore[reportPrivateUsage]  # see `call`


def check_owned(path: Path) -> None:
    """Refuse a file that is a link, no plain file, another user's, or has a second name.

    SQLite itself would follow a symbolic link. Raises Unsafe; a missing file is fine.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != os.geteuid():
        raise Unsafe(f"{path.name} is not a plain file of this user")


def create_file(path: Path) -> None:
    """Make an empty file of mode 0600, where there is none; SQLite gives `-wal` and `-shm` the same mode."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(path, flags, 0o600))


async def connect(path: Path, *, writer: bool) -> aiosqlite.Connection:
    """Open a connection with autocommit and the settings that the promises rest on.

    Raises:
        sqlite3.Error: it cannot be opened, or a setting did not take.
    """
    mode = "rw" if writer else "ro"
    connection = await aiosqlite.connect(
        f"file:{quote(str(path))}?mode={mode}", uri=True, isolation_level=None
    )
    try:
        await call(connection, _configure, raw(connection), writer)
    except BaseException:
        await connection.close()
        raise
    return connection


def _configure(connection: sqlite3.Connection, writer: bool) -> None:
    def setting(pragma: str) -> object:
        # Fetched, since an error while switching is raised by the fetch and not by execute().
        row = connection.execute(f"PRAGMA {pragma}").fetchone()
        return row[0] if row else None

    connection.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}").fetchall()
    if not writer:
        connection.execute("PRAGMA query_only=ON").fetchall()
        return
    connection.execute("PRAGMA synchronous=FULL").fetchall()
    connection.execute("PRAGMA mmap_size=0").fetchall()
    if (
        setting("journal_mode=WAL") != "wal"
        or setting("synchronous") != 2
        or setting(f"journal_size_limit={_WAL_BYTES_MAX}") != _WAL_BYTES_MAX
    ):
        raise sqlite3.OperationalError("a setting did not take")


def migrate(connection: sqlite3.Connection, store_id: str) -> None:
    """Bring the database to SCHEMA_VERSION, each step in one transaction. On the connection's thread.

    Raises NewerSchema, sqlite3.Error.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > SCHEMA_VERSION:
        raise NewerSchema(f"schema {version}, this recapd knows {SCHEMA_VERSION}")
    for number, name in enumerate(_MIGRATIONS[version:], start=version + 1):
        script = files("recapd.storage").joinpath("migrations", name).read_text("utf-8")
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {number};\nCOMMIT;"
        )
    if connection.execute("SELECT count(*) FROM store").fetchone() == (0,):
        connection.execute("INSERT INTO store (store_id) VALUES (?)", (store_id,))


_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def storage_error(error: sqlite3.Error | OSError) -> StorageError:
    """What an error of SQLite or of the disk means to a caller (sqlite.org/rescode.html)."""
    if isinstance(error, OSError):
        if error.errno in _FULL:
            return StorageFull(os.strerror(error.errno))
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StorageReadonly(os.strerror(error.errno))
        return StorageError(os.strerror(error.errno) if error.errno else type(error).__name__)
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    match getattr(error, "sqlite_errorcode", 0) & 0xFF:
        case sqlite3.SQLITE_FULL:
            return StorageFull(name)
        case sqlite3.SQLITE_READONLY:
            return StorageReadonly(name)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return Damaged(name)
        case _:
            return StorageError(name)
