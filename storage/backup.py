"""A copy of the store that can be put back, made while a daemon serves it or while none does.

::

    <backup>/store.db       one state of the database, without a log and without access tokens
    <backup>/archives/      every archive that it names, as in the store
    <backup>/manifest.json  written last: what the backup holds, size and SHA-256 of store.db

Size and SHA-256 of each archive stand in the database. A copy without a manifest, or that differs
from it, is torn and is not put back.

The database is copied first and by one read transaction (sqlite.org/backup.html), over a connection
that cannot write or checkpoint (where no log was it leaves an empty one); then the archives. A
deletion removes its row before its file, so an archive that is not there, or is another's, and that
the live database does not name any more only means that the copy has to be made again.
"""

import errno
import hashlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Final, Literal

import msgspec

from recapd.storage import swap
from recapd.storage.archive import archive_path, open_archive, sweep, sync_folder, verify_archive
from recapd.storage.database import (
    Damaged,
    NewerSchema,
    check_private_file,
    connect_here,
    make_private_file,
    migrate,
    storage_error,
)
from recapd.storage.entry import encode_time
from recapd.storage.errors import ArchiveCorrupt, ArchiveMissing
from recapd.storage.lock import hold, make_private_folder
from recapd.storage.queries import list_revisions
from recapd.storage.sqlite import make_folder
from recapd.storage.store import Fault, Revision
from recapd.storage.verify import check_session

_TRIES: Final = 10  # to find a moment without a deletion; what was copied before is not read again
_CHUNK_BYTES: Final = 1 << 20
_MANIFEST_BYTES_MAX: Final = 1 << 16


class BackupError(Exception):
    """Base of what is refused here; its text has no path."""


class NoStore(BackupError):
    """There is nothing to copy."""

    def __init__(self) -> None:
        super().__init__("there is no store")


class TargetInUse(BackupError):
    """A backup goes into a new or empty folder outside the store."""

    def __init__(self) -> None:
        super().__init__("the folder for the backup is not empty, or lies in the store")


class Unsettled(BackupError):
    """Sessions were deleted each time that the store was copied."""

    def __init__(self) -> None:
        super().__init__("sessions are being deleted all the time; try again")


class Torn(BackupError):
    """It is no backup that was finished, or `part` of it is not what was written."""

    def __init__(self, part: str) -> None:
        super().__init__(f"this is no whole backup: {part}")


class StoreInUse(BackupError):
    """The store that would be replaced has sessions, or cannot be read."""

    def __init__(self) -> None:
        super().__init__("the store has sessions, or cannot be read")


class Faulty(BackupError):
    """What was read is not as it was written; `faults` says where."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(f"{len(faults)} fault{'s' * (len(faults) != 1)}")
        self.faults = faults


class FileMark(msgspec.Struct, frozen=True):
    """What tells one file from another."""

    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a backup holds; `bytes` are those of its archives and its database."""

    recapd: str
    store_id: str
    made_at: str
    sessions: int
    archives: int
    bytes: int
    database: FileMark
    format: Literal["recapd-backup"] = "recapd-backup"
    version: Literal[1] = 1


_decode_manifest = msgspec.json.Decoder(Manifest).decode


def make_backup(folder: Path, target: Path, *, recapd: str, now_ms: Callable[[], int]) -> Manifest:
    """Copy the store in `folder` into `target`, which is made or is empty.

    Every byte was read back and verified, and is durable, on return. `recapd` is the version that
    is said to have made it.

    Raises:
        NoStore, TargetInUse, Unsettled.
        Faulty: what is stored has faults; a backup would only hide them.
        Unsafe, UnsafeFolder, NewerSchema, StorageError, OSError.

    and then nothing is left in `target`.
    """
    database = folder / "store.db"
    try:
        check_private_file(database)
    except FileNotFoundError as error:
        raise NoStore from error
    made = _make_target(folder, target)
    try:
        try:
            with closing(connect_here(database, writer=False)) as live:
                _copy_store(live, folder / "archives", target)
            manifest = _describe(target, recapd, encode_time(now_ms()))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise storage_error(error) from error
        _write_manifest(target, manifest)
        sync_folder(target.parent.resolve())
    except BaseException:
        _clear(target)
        if made:
            target.rmdir()
        raise
    return manifest


def restore_backup(backup: Path, folder: Path, *, replace: bool) -> Manifest:
    """Make the store in `folder` what it was when `backup` was made. Durable on return.

    All of the backup is read and verified first. A crash leaves the old store or the new one, which
    the next start puts in its place. `replace`: also when the store has sessions.

    Raises:
        Torn, Faulty, StoreInUse.
        Locked: a daemon serves the store.
        Unsafe, UnsafeFolder, NewerSchema, StorageError, OSError.

    and then the store is as it was, unless an OSError came so late that it is the new one already.
    """
    manifest = _read_manifest(backup)
    make_folder(folder)
    with hold(folder / "lock"):
        swap.finish(folder)
        if not replace and _has_sessions(folder / "store.db"):
            raise StoreInUse
        staging = swap.prepare(folder)
        try:
            try:
                _copy_backup(backup, staging, manifest)
            except (sqlite3.Error, UnicodeDecodeError) as error:
                raise storage_error(error) from error
        except BaseException:
            swap.discard(folder)
            raise
        swap.commit(folder)
    return manifest


def _make_target(folder: Path, target: Path) -> bool:
    """Whether it had to be made."""
    if target.resolve().is_relative_to(folder.resolve()):
        raise TargetInUse
    try:
        target.mkdir(mode=0o700)
    except FileExistsError:
        make_private_folder(target)
        if any(target.iterdir()):
            raise TargetInUse from None
        return False
    return True


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


# Copying.


def _copy_store(live: sqlite3.Connection, archives: Path, target: Path) -> None:
    copied: dict[tuple[str, int], str] = {}
    (target / "archives").mkdir(mode=0o700)
    for _ in range(_TRIES):
        _copy_database(live, target / "store.db")
        with closing(connect_here(target / "store.db", writer=False)) as db:
            named = {
                (session_id, revision.revision): revision for session_id, revision in _named(db)
            }
        if all(
            copied.get(key) == revision.sha256
            or _copy_named(live, archives, target / "archives", key[0], revision, copied)
            for key, revision in named.items()
        ):
            sweep(target / "archives", named)  # of sessions that are gone since
            _sync_archives(target / "archives")
            return
    raise Unsettled


def _copy_database(live: sqlite3.Connection, path: Path) -> None:
    """Write one state of the database, at the present schema, into a file that needs no log."""
    path.unlink(missing_ok=True)
    make_private_file(path)
    if live.execute("PRAGMA user_version").fetchone() == (0,):
        raise NoStore  # its first start was cut short
    with closing(connect_here(path, writer=True)) as copy:
        live.backup(copy)
        if copy.execute("PRAGMA journal_mode=DELETE").fetchone() != ("delete",):
            raise sqlite3.OperationalError("a setting did not take")
        migrate(copy, "")
        copy.execute("DELETE FROM access_tokens")  # or one revoked since would be good again
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _copy_named(
    live: sqlite3.Connection,
    source: Path,
    target: Path,
    session_id: str,
    revision: Revision,
    copied: dict[tuple[str, int], str],
) -> bool:
    """Copy an archive, or find that its session was deleted meanwhile. Raises Faulty."""
    key = session_id, revision.revision
    archive_path(target, *key).unlink(missing_ok=True)
    try:
        _copy_archive(source, target, session_id, revision)
    except (ArchiveMissing, ArchiveCorrupt) as error:
        if not _still_names(live, session_id, revision):
            return False
        raise Faulty([_fault(session_id, error)]) from error
    copied[key] = revision.sha256
    return True


def _copy_archive(source: Path, target: Path, session_id: str, revision: Revision) -> None:
    """Raises ArchiveMissing, ArchiveCorrupt, OSError."""
    path = archive_path(target, session_id, revision.revision)
    with open_archive(source, session_id, revision.revision) as file:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if _copy_file(file, path) != FileMark(revision.bytes, revision.sha256):
            raise ArchiveCorrupt(revision.revision, "sha256")


def _copy_file(source: BufferedReader, path: Path) -> FileMark:
    """Copy into a new file, private and synced. Returns what was read."""
    digest = hashlib.sha256()
    size_bytes = 0
    with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
        while piece := source.read(_CHUNK_BYTES):
            digest.update(piece)
            size_bytes += len(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return FileMark(size_bytes, digest.hexdigest())


def _copy_backup(backup: Path, staging: Path, manifest: Manifest) -> None:
    """Copy a backup, and compare all of it with its manifest and its rows."""
    with _open(backup / "store.db") as file:
        if _copy_file(file, staging / "store.db") != manifest.database:
            raise Torn("store.db is not what was written")
    (staging / "archives").mkdir(mode=0o700)
    with closing(connect_here(staging / "store.db", writer=True)) as db:
        migrate(db, manifest.store_id)
        named = list(_named(db))
    for session_id, revision in named:
        try:
            _copy_archive(backup / "archives", staging / "archives", session_id, revision)
        except (ArchiveMissing, ArchiveCorrupt) as error:
            raise Faulty([_fault(session_id, error)]) from error
    _sync_archives(staging / "archives")
    copied = _describe(staging, manifest.recapd, manifest.made_at)
    if (copied.store_id, copied.sessions, copied.archives) != (
        *(manifest.store_id, manifest.sessions, manifest.archives),
    ):
        raise Torn("manifest.json is not what was written")


def _sync_archives(archives: Path) -> None:
    for folder in archives.iterdir():
        sync_folder(folder)
    sync_folder(archives)


# Looking at what was copied.


def _named(copy: sqlite3.Connection) -> Iterator[tuple[str, Revision]]:
    """Session and revision of each archive that a copy names."""
    for (session_id,) in copy.execute(
        "SELECT session_id FROM sessions WHERE generation > 0"
    ).fetchall():
        for revision in list_revisions(copy, session_id):
            yield session_id, revision


def _still_names(live: sqlite3.Connection, session_id: str, revision: Revision) -> bool:
    found = live.execute(
        "SELECT sha256 FROM archives WHERE revision = ? AND key ="
        " (SELECT key FROM sessions WHERE session_id = ?)",
        (revision.revision, session_id),
    ).fetchone()
    return bool(found == (revision.sha256,))


def _describe(folder: Path, recapd: str, made_at: str) -> Manifest:
    """Read every byte of a copy. Raises Faulty, Damaged, sqlite3.Error, OSError."""
    database = folder / "store.db"
    faults: list[Fault] = []
    sessions = archives = archive_bytes = 0
    with closing(connect_here(database, writer=False)) as db:
        if db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
            raise Damaged("integrity_check")
        (store_id,) = db.execute("SELECT store_id FROM store").fetchone()
        for (session_id,) in db.execute("SELECT session_id FROM sessions").fetchall():
            _, revisions, found = check_session(db, session_id, read_lines=True)
            faults += found
            sessions += 1
            for revision in revisions:
                archives += 1
                archive_bytes += revision.bytes
                try:
                    with open_archive(
                        folder / "archives", session_id, revision.revision
                    ) as archive:
                        verify_archive(archive, store_id, session_id, revision)
                except (ArchiveMissing, ArchiveCorrupt) as error:
                    faults.append(_fault(session_id, error))
    if faults:
        raise Faulty(faults)
    with _open(database) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        mark = FileMark(os.fstat(file.fileno()).st_size, digest)
    return Manifest(recapd, store_id, made_at, sessions, archives, archive_bytes + mark.bytes, mark)


def _fault(session_id: str, error: ArchiveMissing | ArchiveCorrupt) -> Fault:
    kind: Literal["archive_missing", "archive_corrupt"] = (
        "archive_missing" if isinstance(error, ArchiveMissing) else "archive_corrupt"
    )
    return Fault(session_id, error.revision, kind)


def _has_sessions(database: Path) -> bool:
    """Also when that cannot be told: what is damaged may be all that is left of them."""
    try:
        if check_private_file(database).st_size == 0:
            return False
    except FileNotFoundError:
        return False
    try:
        with closing(connect_here(database, writer=False)) as db:
            return bool(db.execute("SELECT EXISTS (SELECT 1 FROM sessions)").fetchone() == (1,))
    except (sqlite3.Error, UnicodeDecodeError, NewerSchema):
        return True


# The manifest.


def _write_manifest(backup: Path, manifest: Manifest) -> None:
    path = backup / "manifest.json"
    with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(backup)


def _read_manifest(backup: Path) -> Manifest:
    with _open(backup / "manifest.json") as file:
        text = file.read(_MANIFEST_BYTES_MAX)
    try:
        return _decode_manifest(text)
    except msgspec.MsgspecError as error:
        raise Torn("manifest.json is not what was written") from error


def _open(path: Path) -> BufferedReader:
    """Open a plain file, no link. Raises Torn, OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise Torn(f"{path.name} is not there") from error
        if error.errno == errno.ELOOP:
            raise Torn(f"{path.name} is not a plain file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Torn(f"{path.name} is not a plain file")
    return open(descriptor, "rb")
