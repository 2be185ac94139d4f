"""An archive file is whole, durable and checkable by anyone; anything else is an error."""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from recapd.storage.archive import (
    Header,
    archive_path,
    open_archive,
    read_lines,
    sweep,
    verify_archive,
    write_archive,
)
from recapd.storage.errors import ArchiveCorrupt, ArchiveMissing
from recapd.storage.store import Revision, Tokens

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

HEADER = Header("store", "session", 7, 2, "compaction", "operation", 3)
LINES = [b'{"id":%d,"at":"2026-12-01T00:00:00.000Z","item":{"n":%d}}' % (n, n) for n in (1, 2, 3)]


def write(archives: Path, header: Header = HEADER, lines: list[bytes] = LINES) -> Revision:
    """An archive of `lines`, and what the database would say of it."""
    return expected(header, *write_archive(archives, header, lines, set()))


def expected(header: Header, size_bytes: int, sha256: str) -> Revision:
    return Revision(
        header.revision,
        header.generation,
        header.kind,
        header.operation_id,
        0,
        header.entries,
        Tokens(),
        size_bytes,
        sha256,
    )


def put(archives: Path, data: bytes, header: Header = HEADER) -> Revision:
    """A file of these bytes, and a database that says that it is just so."""
    path = archive_path(archives, header.session_id, header.revision)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return expected(header, len(data), hashlib.sha256(data).hexdigest())


def read(archives: Path, revision: Revision, header: Header = HEADER) -> list[bytes]:
    """The lines, as they are read by the store: all verified before the first."""
    with open_archive(archives, header.session_id, revision.revision) as file:
        verify_archive(file, header.store_id, header.session_id, revision)
        return list(read_lines(file, revision.revision, range(revision.entries)))


def fault(archives: Path, revision: Revision, header: Header = HEADER) -> str:
    with pytest.raises(ArchiveCorrupt) as refusal:
        read(archives, revision, header)
    assert refusal.value.revision == revision.revision
    return refusal.value.fault


def files(archives: Path) -> list[Path]:
    return [path for path in archives.rglob("*") if not path.is_dir()]


# What is written.


def test_anyone_can_read_and_check_an_archive_without_recapd(tmp_path: Path) -> None:
    """DESIGN.md §1, Archive file: one zstd stream, a header, the lines, a trailer; `sha256sum`."""
    revision = write(tmp_path)
    data = archive_path(tmp_path, "session", 7).read_bytes()
    assert (revision.bytes, revision.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    content = zstd.decompress(data)
    header, *lines, trailer, rest = content.split(b"\n")
    assert rest == b""
    assert json.loads(header) == {
        "format": "recapd-archive",
        "version": 1,
        "store_id": "store",
        "session_id": "session",
        "revision": 7,
        "generation": 2,
        "kind": "compaction",
        "operation_id": "operation",
        "entries": 3,
    }
    assert lines == LINES
    before = content[: -len(trailer) - 1]
    assert json.loads(trailer) == {"entries": 3, "sha256": hashlib.sha256(before).hexdigest()}


def test_a_session_id_never_becomes_a_path(tmp_path: Path) -> None:
    """PROMISES.md S5."""
    for session_id in ["..", ".", "a:b", "A" * 128, "a/b", "\0", "é"]:
        path = archive_path(tmp_path, session_id, 1)
        assert path.relative_to(tmp_path).parts == (
            hashlib.sha256(session_id.encode()).hexdigest(),
            "1.jsonl.zst",
        )


def test_an_archive_is_private(tmp_path: Path) -> None:
    """PROMISES.md S1: under any umask."""
    before = os.umask(0)
    try:
        write(tmp_path)
    finally:
        os.umask(before)
    path = archive_path(tmp_path, "session", 7)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_an_empty_history_has_an_archive(tmp_path: Path) -> None:
    """PROTOCOL.md §5.5: the pipeline accepts an empty history."""
    header = structs.replace(HEADER, entries=0)
    assert read(tmp_path, write(tmp_path, header, []), header) == []


def test_long_lines_and_many_lines_come_back(tmp_path: Path) -> None:
    """Promise 6, over the borders of what is read and written at once."""
    rng = random.Random(1)
    lines = [rng.randbytes(size).hex().encode() for size in (3 << 20, 0, 1 << 19, 1 << 19, 1)]
    lines += [b"%d" % number for number in range(20_000)]
    header = structs.replace(HEADER, entries=len(lines))
    revision = write(tmp_path, header, lines)
    assert read(tmp_path, revision, header) == lines
    with open_archive(tmp_path, "session", 7) as file:
        assert list(read_lines(file, 7, range(4, 9))) == lines[4:9]


def test_an_archive_that_was_not_used_is_replaced(tmp_path: Path) -> None:
    """A compaction that failed behind its archive may be made again."""
    write(tmp_path, structs.replace(HEADER, operation_id="first"))
    revision = write(tmp_path)
    assert read(tmp_path, revision) == LINES
    assert len(files(tmp_path)) == 1


# The order of what is done.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the disk was asked, with the name of the file or folder that it was about."""
    calls: list[tuple[str, str]] = []

    def record(name: str, what: Callable[..., str]) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, what(*args)))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, recorded)

    def name_of(descriptor: int, *_: object) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def target_of(_: Path, target: Path) -> str:
        return target.name

    record("write", name_of)
    record("fsync", name_of)
    record("rename", target_of)
    return calls


def test_the_file_is_synced_then_named_then_its_folder_is_synced(
    tmp_path: Path, calls: list[tuple[str, str]]
) -> None:
    """PROMISES.md D3 and D10; the folder's own name is durable before anything is in it."""
    synced: set[Path] = set()
    write_archive(tmp_path, HEADER, LINES, synced)
    session_folder = archive_path(tmp_path, "session", 7).parent
    (first, *written, sync, rename, last) = calls
    temporary = sync[1]
    assert first == ("fsync", tmp_path.name)
    assert set(written) == {("write", temporary)}
    assert temporary.endswith(".tmp")
    assert sync == ("fsync", temporary)
    assert rename == ("rename", "7.jsonl.zst")
    assert last == ("fsync", session_folder.name)
    assert synced == {session_folder}
    calls.clear()
    write_archive(tmp_path, structs.replace(HEADER, revision=8), LINES, synced)
    assert [name for name, _ in calls if name != "write"] == ["fsync", "rename", "fsync"]


# What fails.


def failing(patch: pytest.MonkeyPatch, name: str, number: int, code: int) -> list[int]:
    """Lets the n-th call of an `os` function fail; gives a list that grows with the calls."""
    count: list[int] = []
    real: Callable[..., Any] = getattr(os, name)

    def fail(*args: Any, **kwargs: Any) -> Any:
        count.append(0)
        if len(count) == number:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    patch.setattr(os, name, fail)
    return count


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        ("write", 1, errno.ENOSPC),
        ("write", 1, errno.EIO),
        ("write", 1, errno.EFBIG),
        ("rename", 1, errno.ENOSPC),
        ("fsync", 1, errno.EIO),  # of the folder of all archives
        ("fsync", 2, errno.EIO),  # of the file
        ("fsync", 3, errno.EIO),  # of its folder
    ],
)
def test_a_write_that_fails_leaves_nothing_and_is_not_tried_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
    code: int,
) -> None:
    """PROMISES.md D6 and F1: a failed fsync is never repeated; the archive is written anew."""
    with monkeypatch.context() as patch:
        count = failing(patch, name, number, code)
        with pytest.raises(OSError, match=r"No space|Input/output|too large"):
            write(tmp_path)
        assert len(count) == number
    assert files(tmp_path) == []
    assert read(tmp_path, write(tmp_path)) == LINES


def test_a_folder_whose_sync_failed_is_synced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROMISES.md D6: a name is durable only when its sync said so."""
    synced: set[Path] = set()
    with monkeypatch.context() as patch:
        failing(patch, "fsync", 1, errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            write_archive(tmp_path, HEADER, LINES, synced)
    assert synced == set()


def test_a_write_may_take_a_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """write(2): the rest is written by further calls."""
    real = os.write

    def write_part(descriptor: int, data: memoryview) -> int:
        return real(descriptor, data[:7])

    monkeypatch.setattr(os, "write", write_part)
    assert read(tmp_path, write(tmp_path)) == LINES


def test_what_is_read_back_differently_is_no_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STYLE.md rule 12: checked behind the write as well."""
    real = os.write

    def spoil(descriptor: int, data: memoryview) -> int:
        return real(descriptor, bytes(data)[:-1] + b"\0")

    monkeypatch.setattr(os, "write", spoil)
    with pytest.raises(OSError, match="read back"):
        write(tmp_path)
    assert files(tmp_path) == []


@pytest.mark.parametrize("error", [KeyError(), KeyboardInterrupt(), MemoryError()])
def test_lines_that_fail_leave_nothing(tmp_path: Path, error: BaseException) -> None:
    """PROMISES.md F1 and F5: the database may fail in the middle of it."""

    def lines() -> Iterator[bytes]:
        yield LINES[0]
        raise error

    with pytest.raises(type(error)):
        write_archive(tmp_path, HEADER, lines(), set())
    assert files(tmp_path) == []


@pytest.mark.parametrize("lines", [LINES[:2], [*LINES, LINES[0]]])
def test_a_history_of_another_length_is_not_archived(tmp_path: Path, lines: list[bytes]) -> None:
    """STYLE.md rule 12: checked before the write."""
    with pytest.raises(ValueError, match="entries instead of 3"):
        write(tmp_path, HEADER, lines)
    assert files(tmp_path) == []


def test_the_error_that_is_told_is_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails may also refuse to remove what was begun."""
    failing(monkeypatch, "fsync", 2, errno.ENOSPC)

    def fail(_: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EIO, "unlink")

    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path)


# What is not what was written.


def test_each_flipped_byte_is_found(tmp_path: Path) -> None:
    """PROMISES.md R4."""
    revision = write(tmp_path)
    path = archive_path(tmp_path, "session", 7)
    data = path.read_bytes()
    for index in range(len(data)):
        for mask in (0x01, 0xFF):
            flipped = bytearray(data)
            flipped[index] ^= mask
            path.write_bytes(flipped)
            assert fault(tmp_path, revision) == "sha256"
    path.write_bytes(data)
    assert read(tmp_path, revision) == LINES


def test_each_other_length_is_found(tmp_path: Path) -> None:
    """PROMISES.md R4: cut short, and lengthened."""
    revision = write(tmp_path)
    path = archive_path(tmp_path, "session", 7)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert fault(tmp_path, revision) == "size"
    for more in (b"\0", b"\n", data):
        path.write_bytes(data + more)
        assert fault(tmp_path, revision) == "size"


def test_a_stream_that_was_cut_is_found_even_if_the_database_agrees(tmp_path: Path) -> None:
    """DESIGN.md §1: header and trailer are checked, whatever size and hash say."""
    write(tmp_path)
    data = archive_path(tmp_path, "session", 7).read_bytes()
    for length in range(len(data)):
        assert fault(tmp_path, put(tmp_path, data[:length])) == "content"


@pytest.mark.parametrize(
    "other",
    [
        structs.replace(HEADER, session_id="another"),
        structs.replace(HEADER, revision=8),
        structs.replace(HEADER, store_id="another"),
        structs.replace(HEADER, generation=3),
        structs.replace(HEADER, kind="restore"),
        structs.replace(HEADER, operation_id="another"),
    ],
)
def test_an_archive_of_something_else_is_found(tmp_path: Path, other: Header) -> None:
    """PROMISES.md R4, swapped: by its size or hash, and by its header if they fit."""
    revision = write(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    write(tmp_path / "a", other)
    data = archive_path(tmp_path / "a", other.session_id, other.revision).read_bytes()
    assert fault(tmp_path / "b", put(tmp_path / "b", data)) == "header"
    put(tmp_path, data)
    assert fault(tmp_path, revision) in ("size", "sha256")


def content_of(tmp_path: Path) -> tuple[bytes, list[bytes], bytes]:
    """The header, the lines and the trailer of a good archive."""
    write(tmp_path)
    content = zstd.decompress(archive_path(tmp_path, "session", 7).read_bytes())
    header, *lines, trailer, _ = content.split(b"\n")
    return header, lines, trailer


@pytest.mark.parametrize(
    ("pieces", "found"),
    [
        ("h 1 2 3 t end", None),
        ("h 1 2 3 t", "content"),
        ("h 1 2 3 end", "content"),
        ("h 2 3 t end", "content"),
        ("h 1 2 3 1 t end", "content"),  # what should be the trailer is a line
        ("h 3 2 1 t end", "trailer"),
        ("h 1 2 3 t 1 end", "length"),
        ("1 2 3 t end", "content"),
        ("{} 1 2 3 t end", "content"),
        ("\xff 1 2 3 t end", "content"),
        ("end", "content"),
    ],
)
def test_content_that_does_not_fit_is_found_even_if_the_database_agrees(
    tmp_path: Path, pieces: str, found: str | None
) -> None:
    """DESIGN.md §1, Archive file: the count and the hash in the trailer."""
    header, lines, trailer = content_of(tmp_path)
    named = {"h": header, "1": lines[0], "2": lines[1], "3": lines[2], "t": trailer, "end": b""}
    content = b"\n".join(named.get(piece, piece.encode("latin-1")) for piece in pieces.split(" "))
    revision = put(tmp_path, zstd.compress(content))
    if found is None:
        assert read(tmp_path, revision) == LINES
    else:
        assert fault(tmp_path, revision) == found


def test_a_future_version_is_not_read_as_this_one(tmp_path: Path) -> None:
    """The header has a version so that nobody guesses."""
    header, lines, trailer = content_of(tmp_path)
    header = header.replace(b'"version":1', b'"version":2')
    data = zstd.compress(b"\n".join([header, *lines, trailer, b""]))
    assert fault(tmp_path, put(tmp_path, data)) == "content"


@pytest.mark.parametrize(
    "what",
    ["nothing", "no folder", "a link", "a dangling link", "a pipe", "a socket", "a folder"],
)
def test_what_is_no_file_of_ours_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Promise 5 and PROMISES.md S4; opening a pipe does not wait, either."""
    revision = write(tmp_path)
    path = archive_path(tmp_path, "session", 7)
    path.rename(tmp_path / "elsewhere")
    match what:
        case "no folder":
            path.parent.rmdir()
        case "a link":
            path.symlink_to(tmp_path / "elsewhere")
        case "a dangling link":
            path.symlink_to(tmp_path / "nowhere")
        case "a pipe":
            os.mkfifo(path)
        case "a socket":
            monkeypatch.chdir(path.parent)
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        case "a folder":
            path.mkdir()
        case _:
            pass
    with pytest.raises(ArchiveMissing) as refusal:
        read(tmp_path, revision)
    assert refusal.value.revision == 7


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM])
def test_a_file_that_cannot_be_opened_now_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Promise 13: for want of a descriptor nobody is to be sent to the backups."""
    revision = write(tmp_path)
    failing(monkeypatch, "open", 1, code)
    with pytest.raises(OSError, match=r"\[Errno"):
        read(tmp_path, revision)
    assert read(tmp_path, revision) == LINES


def test_what_was_verified_is_what_is_read(tmp_path: Path) -> None:
    """STYLE.md rule 12: no reader returns unverified bytes, whatever is renamed in between."""
    revision = write(tmp_path)
    with open_archive(tmp_path, "session", 7) as file:
        verify_archive(file, "store", "session", revision)
        other = structs.replace(HEADER, entries=1)
        write(tmp_path, other, [b"another"])
        assert list(read_lines(file, 7, range(3))) == LINES


# The sweep.


def test_a_sweep_removes_what_no_row_names_and_nothing_else(tmp_path: Path) -> None:
    """PROMISES.md R3."""
    write(tmp_path)
    write(tmp_path, structs.replace(HEADER, revision=8))
    write(tmp_path, structs.replace(HEADER, session_id="gone"))
    named = archive_path(tmp_path, "session", 7)
    (named.parent / ".7.0123.tmp").touch()
    (tmp_path / "stray").touch()
    (tmp_path / "link").symlink_to(named.parent)
    (tmp_path / "empty").mkdir()
    assert sweep(tmp_path, {("session", 7), ("missing", 1)}) == 5
    assert files(tmp_path) == [named]
    assert list(tmp_path.iterdir()) == [named.parent]
    assert sweep(tmp_path, {("session", 7)}) == 0


def test_a_sweep_leaves_what_it_cannot_remove(tmp_path: Path) -> None:
    """A start does not fail over what somebody put there."""
    write(tmp_path)
    inner = archive_path(tmp_path, "session", 7).parent / "folder"
    inner.mkdir()
    (inner / "file").touch()
    assert sweep(tmp_path, set()) == 1
    assert files(tmp_path) == [inner / "file"]


def test_a_sweep_keeps_every_named_archive_of_any_layout(tmp_path: Path) -> None:
    """PROMISES.md R3: random folders of archives."""
    rng = random.Random(3)
    data = tmp_path / "template"
    data.write_bytes(b"x")
    for number in range(100):
        archives = tmp_path / str(number)
        archives.mkdir()
        everything = [(f"s{rng.randrange(4)}", rng.randrange(6)) for _ in range(rng.randrange(9))]
        for session_id, revision in everything:
            path = archive_path(archives, session_id, revision)
            path.parent.mkdir(exist_ok=True)
            shutil.copy(data, path)
            if rng.random() < 0.3:
                path.with_name(f".{revision}.{rng.randrange(99)}.tmp").touch()
        named = {name for name in everything if rng.random() < 0.5}
        sweep(archives, named)
        assert set(files(archives)) == {archive_path(archives, *name) for name in named}
        assert {path.parent for path in files(archives)} == set(archives.iterdir())


def test_the_checksum_of_the_stream_is_on(tmp_path: Path) -> None:
    """PROMISES.md A.9: it is off by default, and `zstd -dc` is to find damage by itself."""
    write(tmp_path)
    descriptor = archive_path(tmp_path, "session", 7).read_bytes()[4]
    assert descriptor & 0b100  # RFC 8878 §3.1.1.1.1, Content_Checksum_flag


@pytest.mark.promise("S5")
def test_no_id_of_a_session_leads_out_of_the_folder(tmp_path: Path) -> None:
    """Whatever its characters are: folder and file are called after a hash and a number."""
    alphabet = "abcXYZ019_.:-"
    chosen = random.Random(7)
    ids = {"".join(chosen.choices(alphabet, k=chosen.randrange(1, 129))) for _ in range(10_000)}
    ids |= {".", "..", "...", "-", ":", "a" * 128, "../x", "/etc/passwd", "a/b", "\0", "\ud7ff", ""}
    paths = {archive_path(tmp_path, session_id, 1) for session_id in ids}
    assert len(paths) == len(ids)
    for path in paths:
        assert path.parent.parent == tmp_path
        assert re.fullmatch(r"[0-9a-f]{64}/1\.jsonl\.zst", str(path.relative_to(tmp_path)))
