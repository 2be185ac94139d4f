"""One archive file: a history that was replaced, readable and checkable without recapd.

::

    archives/<sha256 of the session id, hexadecimal>/<revision>.jsonl.zst

    one zstd stream with a checksum (RFC 8878 §3.1.1), in it lines that end in LF:
      header    {"format":"recapd-archive","version":1,"store_id":…,"session_id":…,"revision":…,
                 "generation":…,"kind":…,"operation_id":…,"entries":N}
      N entries, as entry.py says
      trailer   {"entries":N,"sha256":"…"}        the hash is of every byte before the trailer

Size and SHA-256 of the file itself stand in the database. A file comes to its final name only when
it is whole, synced and read back, and its folder is synced before anything may name it; a temporary
file that a crash left is swept at the next start. Nothing of a file is handed out before all of it
was verified.
"""

import errno
import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from io import BufferedReader, FileIO
from itertools import islice
from pathlib import Path
from typing import Final, Literal

import msgspec

from recapd.storage.errors import ArchiveCorrupt, ArchiveMissing
from recapd.storage.store import Kind, Revision

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_OPTIONS: Final[Mapping[int, int]] = {
    zstd.CompressionParameter.compression_level: 1,
    zstd.CompressionParameter.checksum_flag: 1,  # off by default
}
_CHUNK_BYTES: Final = 1 << 20
_SUFFIX: Final = ".jsonl.zst"
_NO_FILE: Final = {  # of ours: it is gone, or something else is in its place
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENXIO,
    errno.EACCES,
    errno.EPERM,
}


class Header(msgspec.Struct, frozen=True):
    """The first line."""

    store_id: str
    session_id: str
    revision: int
    generation: int
    kind: Kind
    operation_id: str
    entries: int
    format: Literal["recapd-archive"] = "recapd-archive"
    version: Literal[1] = 1


class _Trailer(msgspec.Struct, frozen=True):
    entries: int
    sha256: str


_encode = msgspec.json.Encoder().encode
_decode_header = msgspec.json.Decoder(Header).decode
_decode_trailer = msgspec.json.Decoder(_Trailer).decode


def archive_path(archives: Path, session_id: str, revision: int) -> Path:
    """Where a session's archive lies. The id itself never becomes part of a path."""
    return archives / hashlib.sha256(session_id.encode()).hexdigest() / f"{revision}{_SUFFIX}"


def write_archive(
    archives: Path, header: Header, lines: Iterable[bytes], synced: set[Path]
) -> tuple[int, str]:
    """Write, sync, read back and name one archive; durable on return.

    A file of that name is replaced. `synced` keeps the folders whose own names are durable.

    Returns its size in bytes and its SHA-256 in hexadecimal.

    Raises:
        OSError: and nothing of it is left under either name. A failed fsync is never repeated: the
            next attempt writes a new file, since the kernel may have dropped pages of this one.
        ValueError: `lines` does not have `header.entries` lines.
    """
    path = archive_path(archives, header.session_id, header.revision)
    if path.parent not in synced:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        sync_folder(archives)  # also when it was there: an earlier life may have died before that
        synced.add(path.parent)
    temporary = path.with_name(f".{header.revision}.{secrets.token_hex(8)}.tmp")
    name = temporary  # of the file as it is
    try:
        with open(temporary, "x+b", buffering=0, opener=partial(os.open, mode=0o600)) as file:
            size_bytes, digest = _write(file, header, lines)
            os.fsync(file.fileno())
            file.seek(0)
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise OSError(errno.EIO, "what was written is read back differently")
        os.rename(temporary, path)
        name = path
        sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # what cannot be removed is swept at the next start
            name.unlink()
        raise
    return size_bytes, digest


def _write(file: FileIO, header: Header, lines: Iterable[bytes]) -> tuple[int, str]:
    compressor = zstd.ZstdCompressor(options=_OPTIONS)
    file_hash = hashlib.sha256()
    content_hash = hashlib.sha256()
    size_bytes = 0

    def put(piece: bytes) -> None:
        nonlocal size_bytes
        file_hash.update(piece)
        size_bytes += len(piece)
        view = memoryview(piece)
        while view:  # a write may take a part only (write(2))
            view = view[os.write(file.fileno(), view) :]

    def add(content: bytes) -> None:
        content_hash.update(content)
        put(compressor.compress(content))

    add(_encode(header) + b"\n")
    count = 0
    waiting: list[bytes] = []
    waiting_bytes = 0
    for line in lines:
        count += 1
        waiting.append(line)
        waiting_bytes += len(line)
        if waiting_bytes > _CHUNK_BYTES:
            add(b"\n".join(waiting) + b"\n")
            waiting.clear()
            waiting_bytes = 0
    if waiting:
        add(b"\n".join(waiting) + b"\n")
    if count != header.entries:
        raise ValueError(f"{count} entries instead of {header.entries}")
    trailer = _encode(_Trailer(count, content_hash.hexdigest())) + b"\n"
    put(compressor.compress(trailer))
    put(compressor.flush())
    return size_bytes, file_hash.hexdigest()


def open_archive(archives: Path, session_id: str, revision: int) -> BufferedReader:
    """Open an archive to verify it and to read its lines: both from one file, whatever is renamed.

    Raises ArchiveMissing, OSError.
    """
    path = archive_path(archives, session_id, revision)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        if path.parent.is_symlink():  # the flag is about the last name only
            raise ArchiveMissing(revision)
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ArchiveMissing(revision) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArchiveMissing(revision)
    return open(descriptor, "rb")


def verify_archive(
    file: BufferedReader, store_id: str, session_id: str, expected: Revision
) -> None:
    """Check all of an archive: size, SHA-256, header, trailer, session and revision.

    Raises ArchiveCorrupt, OSError.
    """
    fault = _fault(file, store_id, session_id, expected)
    if fault is not None:
        raise ArchiveCorrupt(expected.revision, fault)


def read_lines(file: BufferedReader, revision: int, indexes: range) -> Iterator[bytes]:
    """The lines of the entries at rising `indexes`. Only of an archive that was just verified.

    Raises ArchiveCorrupt, OSError.
    """
    file.seek(0)
    lines = _lines(file)
    try:
        next(lines)
        yield from islice(lines, indexes.start, indexes.stop)
    except (zstd.ZstdError, EOFError, StopIteration) as error:
        raise ArchiveCorrupt(revision, "content") from error


def _fault(file: BufferedReader, store_id: str, session_id: str, expected: Revision) -> str | None:
    if os.fstat(file.fileno()).st_size != expected.bytes:
        return "size"
    if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
        return "sha256"
    file.seek(0)
    header = Header(
        store_id,
        session_id,
        expected.revision,
        expected.generation,
        expected.kind,
        expected.operation_id,
        expected.entries,
    )
    content_hash = hashlib.sha256()
    lines = _lines(file)
    try:
        line = next(lines)
        if _decode_header(line) != header:
            return "header"
        content_hash.update(line + b"\n")
        for _ in range(expected.entries):
            content_hash.update(next(lines) + b"\n")
        trailer = _decode_trailer(next(lines))
    except (zstd.ZstdError, EOFError, StopIteration, msgspec.MsgspecError):
        return "content"
    if trailer != _Trailer(expected.entries, content_hash.hexdigest()):
        return "trailer"
    return "length" if next(lines, None) is not None else None


def _lines(file: BufferedReader) -> Iterator[bytes]:
    rest = b""
    with zstd.ZstdFile(file) as content:
        while piece := content.read(_CHUNK_BYTES):
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
    if rest:
        raise EOFError


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable (fsync(2): a file's own fsync does not cover its name)."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep(archives: Path, named: Collection[tuple[str, int]]) -> int:
    """Remove every file that is not an archive of `named` (session id and revision).

    Only under the store's lock, before anything is written. Empty folders go as well; what cannot
    be removed stays. Returns how many files were removed.
    """
    keep = {archive_path(archives, session_id, revision) for session_id, revision in named}
    removed = 0
    for folder in list(archives.iterdir()):
        is_folder = folder.is_dir() and not folder.is_symlink()
        for path in list(folder.iterdir()) if is_folder else [folder]:
            if path not in keep:
                with suppress(OSError):
                    path.unlink()
                    removed += 1
        if is_folder:
            with suppress(OSError):
                folder.rmdir()
    return removed
