"""A backup is a whole store of one moment, or it is refused (PROMISES.md R4, R5)."""

import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import closing, contextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from recapd.storage import backup as module
from recapd.storage.archive import archive_path
from recapd.storage.backup import (
    Faulty,
    Manifest,
    NoStore,
    StoreInUse,
    TargetInUse,
    Torn,
    Unsettled,
    make_backup,
    restore_backup,
)
from recapd.storage.database import NewerSchema
from recapd.storage.entry import Entry
from recapd.storage.errors import Unsafe
from recapd.storage.lock import Locked, UnsafeFolder
from recapd.storage.sqlite import open_store
from recapd.storage.store import Fault, NewItem, NewSession, Query, Session, Store

Compact = Callable[..., Awaitable[Session]]
ITEM = NewItem(b'{"role":"user","content":"hello"}', 3)
EVERYTHING = Query(sort="session_id", order="asc", limit=1000)


async def fill(store: Store, compact: Compact, *names: str) -> None:
    """Sessions, each with an archived revision 1 and the present one, 3."""
    for name in names:
        await store.create(NewSession(name), [ITEM, ITEM]).wait()
        await compact(store, name, f"of-{name}", [Entry(3, 0, b"{}")])
        await store.append(
            name, [NewItem(b'{"role":"user","content":"%b"}' % name.encode(), 3)]
        ).wait()


async def contents(store: Store) -> dict[str, dict[int, list[bytes]]]:
    """Every history of every session, by its revision; there must be no fault in it."""
    found: dict[str, dict[int, list[bytes]]] = {}
    for session in await store.sessions(EVERYTHING):
        name = session.session_id
        assert (await store.verify(name, read=lambda _: True)).faults == []
        found[name] = {
            revision: (
                await store.page(name, revision=revision, limit=1000, bytes_max=1 << 20)
            ).entries
            for revision in (*session.archived_revisions, session.revision)
        }
    return found


async def contents_of(folder: Path) -> dict[str, dict[int, list[bytes]]]:
    async with open_store(folder) as store:
        assert store.swept == 0
        return await contents(store)


def back_up(folder: Path, target: Path) -> Manifest:
    return make_backup(folder, target, recapd="1.2.3", now_ms=lambda: 0)


def tree(folder: Path) -> dict[str, bytes]:
    """All files below a folder; of a store without those that say nothing: an index, no log."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
        and path.name not in ("store.db-shm", "lock")
        and (path.name != "store.db-wal" or path.stat().st_size)
    }


@pytest.fixture
async def backed_up(folder: Path, compact: Compact, tmp_path: Path) -> Path:
    """A backup of the sessions `a` and `b`."""
    async with open_store(folder) as store:
        await fill(store, compact, "a", "b")
    back_up(folder, tmp_path / "backup")
    return tmp_path / "backup"


async def test_a_backup_that_is_put_back_is_the_store_byte_for_byte(
    folder: Path, backed_up: Path, tmp_path: Path
) -> None:
    manifest = restore_backup(backed_up, tmp_path / "new", replace=False)
    assert (manifest.sessions, manifest.archives, manifest.recapd) == (2, 2, "1.2.3")
    assert manifest.made_at == "1970-01-01T00:00:00.000Z"
    assert manifest.bytes == sum(
        len(data) for name, data in tree(backed_up).items() if name != "manifest.json"
    )
    assert {*os.listdir(tmp_path / "new")} == {"lock", "store.db", "archives"}
    for path in (folder / "archives").rglob("*.zst"):
        assert (tmp_path / "new" / path.relative_to(folder)).read_bytes() == path.read_bytes()
    assert await contents_of(tmp_path / "new") == await contents_of(folder)


async def test_a_backup_may_be_made_while_the_store_changes(
    folder: Path, compact: Compact, tmp_path: Path
) -> None:
    async with open_store(folder) as store:
        await fill(store, compact, "a", "b")
        done = anyio.Event()

        async def change() -> None:
            number = 0
            while number < 20 or not done.is_set():
                number += 1
                await store.append("a", [ITEM]).wait()
                await compact(store, "b", f"again-{number}", [Entry(100 + number, 0, b"{}")])
                await store.create(NewSession(f"s{number}"), [ITEM]).wait()
                await store.delete(f"s{number}").wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(change)
            await store.append("a", [ITEM]).wait()
            for number in range(5):
                await anyio.to_thread.run_sync(back_up, folder, tmp_path / f"backup-{number}")
            done.set()
        after = await contents(store)
    seen = 0
    for number in range(5):
        restore_backup(tmp_path / f"backup-{number}", tmp_path / f"new-{number}", replace=False)
        then = await contents_of(tmp_path / f"new-{number}")
        (grown,) = [lines for revision, lines in then["a"].items() if revision != 1]
        assert grown == after["a"][max(after["a"])][: len(grown)]
        assert len(then["b"]) >= seen
        seen = len(then["b"])
        for revision in [*then["b"]][:-1]:
            assert then["b"][revision] == after["b"][revision]
    assert seen > 2


@pytest.mark.promise("L3")
async def test_the_live_files_are_only_read_also_when_a_log_was_left(
    folder: Path, compact: Compact, crash: Callable[[Path], Path], tmp_path: Path
) -> None:
    """A killed daemon left its log: what it acknowledged is in the backup, the log stays."""
    async with open_store(folder) as store:
        await fill(store, compact, "a")
        killed = crash(folder)
        expected = await contents(store)
    before = tree(killed)
    assert before["store.db-wal"]
    back_up(killed, tmp_path / "backup")
    assert tree(killed) == before
    assert {*os.listdir(tmp_path / "backup")} == {"store.db", "archives", "manifest.json"}
    restore_backup(tmp_path / "backup", tmp_path / "new", replace=False)
    assert await contents_of(tmp_path / "new") == expected


@contextmanager
def at_each_archive(
    monkeypatch: pytest.MonkeyPatch, action: Callable[[], Coroutine[Any, Any, None]]
) -> Generator[None]:
    """Runs `action` in the event loop right before an archive is copied, in the thread."""
    copy = module._copy_archive  # pyright: ignore[reportPrivateUsage]

    def copy_behind(*args: Any) -> None:
        anyio.from_thread.run(action)
        copy(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_copy_archive", copy_behind)
        yield


@pytest.mark.parametrize("again", [False, True])
async def test_a_session_that_is_deleted_meanwhile_is_left_out(
    folder: Path, compact: Compact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """`again`: another of the same id and revision is made at once; its archive is another one."""
    async with open_store(folder) as store:
        await fill(store, compact, "a", "b")
        gone = False

        async def delete() -> None:
            nonlocal gone
            if not gone:
                gone = True
                await store.delete("a").wait()
                if again:
                    await store.create(NewSession("a"), [ITEM, ITEM, ITEM]).wait()
                    await compact(store, "a", "another", [Entry(4, 0, b"{}")])

        with at_each_archive(monkeypatch, delete):
            await anyio.to_thread.run_sync(back_up, folder, tmp_path / "backup")
        expected = await contents(store)
    restore_backup(tmp_path / "backup", tmp_path / "new", replace=False)
    assert await contents_of(tmp_path / "new") == expected
    assert ("a" in expected) is again
    assert len([*(tmp_path / "backup").rglob("*.zst")]) == 1 + again


async def test_deletions_without_end_are_told_and_nothing_is_left(
    folder: Path, compact: Compact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(folder) as store:
        await fill(store, compact, "s0")
        number = 0

        async def delete() -> None:
            nonlocal number
            number += 1
            await fill(store, compact, f"s{number}")
            await store.delete(f"s{number - 1}").wait()

        with at_each_archive(monkeypatch, delete), pytest.raises(Unsettled):
            await anyio.to_thread.run_sync(back_up, folder, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def link(path: Path) -> None:
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


DAMAGES = [flip, cut, lengthen, Path.unlink, link]


@pytest.mark.promise("R4")
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_store_with_a_damaged_archive_gives_no_backup(
    folder: Path, backed_up: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    """It is told which; an empty folder that was there is empty again."""
    damage(archive_path(folder / "archives", "a", 1))
    (tmp_path / "other").mkdir()
    with pytest.raises(Faulty) as error:
        back_up(folder, tmp_path / "other")
    missing = damage in (Path.unlink, link)
    assert error.value.faults == [
        Fault("a", 1, "archive_missing" if missing else "archive_corrupt")
    ]
    assert os.listdir(tmp_path / "other") == []


@pytest.mark.promise("R5")
async def test_rows_that_do_not_agree_give_no_backup(
    folder: Path, backed_up: Path, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(folder / "store.db")) as db, db:
        db.execute("UPDATE entries SET line = substr(line, 2) WHERE position >> 32 = 1")
    with pytest.raises(Faulty) as error:
        back_up(folder, tmp_path / "other")
    assert error.value.faults == [Fault("a", 3, "entries_damaged")]
    assert not (tmp_path / "other").exists()


@pytest.mark.promise("R4", "R5", "S4")
@pytest.mark.parametrize("name", ["store.db", "manifest.json", "*.zst"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_torn_backup_is_refused_and_the_store_stays(
    folder: Path, backed_up: Path, name: str, damage: Callable[[Path], None]
) -> None:
    (path, *_) = (backed_up / file for file in tree(backed_up) if Path(file).match(name))
    if (name, damage) == ("manifest.json", flip):
        path.write_text(path.read_text().replace('"sessions": 2', '"sessions": 3'))
    else:
        damage(path)
    if (name, damage) == ("manifest.json", lengthen):
        path.write_bytes(path.read_bytes() + b"{}")
    before = tree(folder)
    with pytest.raises((Torn, Faulty)):
        restore_backup(backed_up, folder, replace=True)
    assert tree(folder) == before
    assert not (folder / "restoring").exists()


@pytest.mark.promise("R5")
async def test_a_copy_of_a_live_folder_is_no_backup(
    folder: Path, compact: Compact, crash: Callable[[Path], Path], tmp_path: Path
) -> None:
    async with open_store(folder) as store:
        await fill(store, compact, "a")
        copy = crash(folder)
    (copy / "store.db-wal").unlink()
    with pytest.raises(Torn, match=r"manifest\.json is not there"):
        restore_backup(copy, tmp_path / "new", replace=False)
    assert not (tmp_path / "new").exists()


async def test_a_store_that_is_served_is_not_replaced(folder: Path, backed_up: Path) -> None:
    async with open_store(folder) as store:
        before = tree(folder)
        with pytest.raises(Locked):
            restore_backup(backed_up, folder, replace=True)
        assert tree(folder) == before
        assert [*await contents(store)] == ["a", "b"]


async def test_a_store_with_sessions_is_replaced_only_when_asked(
    folder: Path, compact: Compact, backed_up: Path
) -> None:
    async with open_store(folder) as store:
        expected = await contents(store)
        await store.delete("a").wait()
        await fill(store, compact, "c")
    before = tree(folder)
    with pytest.raises(StoreInUse):
        restore_backup(backed_up, folder, replace=False)
    assert tree(folder) == before
    restore_backup(backed_up, folder, replace=True)
    assert {*os.listdir(folder)} == {"lock", "store.db", "archives"}
    assert await contents_of(folder) == expected


@pytest.mark.promise("R5")
async def test_a_damaged_store_is_replaced_only_when_asked_and_an_empty_one_at_once(
    folder: Path, backed_up: Path, tmp_path: Path
) -> None:
    expected = await contents_of(folder)
    (folder / "store.db").write_bytes(b"no database" * 100)
    with pytest.raises(StoreInUse):
        restore_backup(backed_up, folder, replace=False)
    restore_backup(backed_up, folder, replace=True)
    assert await contents_of(folder) == expected
    async with open_store(tmp_path / "empty"):
        pass
    restore_backup(backed_up, tmp_path / "empty", replace=False)
    assert await contents_of(tmp_path / "empty") == expected


class Died(BaseException):
    """The process ends here."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, at: int) -> Generator[list[str]]:
    """From the `at`-th change to the disk's names on, none is made. Gives those that were."""
    made: list[str] = []

    def instead(name: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(made) >= at:
            raise Died
        made.append(name)
        return make(*args, **kwargs)

    with monkeypatch.context() as patch:
        for name in ("rename", "fsync", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, partial(instead, name, getattr(os, name)))
        yield made


@pytest.mark.promise("R1", "R5")
async def test_a_restore_that_dies_leaves_the_old_store_or_the_new_one(
    folder: Path, compact: Compact, backed_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call that changes names, and once more in each start that finishes it."""
    new = await contents_of(folder)
    async with open_store(folder) as store:
        await fill(store, compact, "c")
        old = await contents(store)
        crashed = tmp_path / "crashed"
        shutil.copytree(folder, crashed)  # with a log that must not be read into the new database
    found: list[bool] = []
    while True:
        at = len(found)
        shutil.copytree(crashed, trial := tmp_path / f"trial-{at}")
        with dying(monkeypatch, at) as made:
            try:
                restore_backup(backed_up, trial, replace=True)
            except Died:
                pass
            else:
                break
        for again in range(at % 7):
            with dying(monkeypatch, again):
                try:
                    async with open_store(trial):
                        pass
                except* Died:
                    pass
        there = await contents_of(trial)
        assert there in (old, new)
        found.append(there == new)
        assert {*os.listdir(trial)} == {"lock", "store.db", "archives"}
        shutil.rmtree(trial)
    assert made.count("rename") == 3
    assert found == sorted(found)  # the old one until a moment, then the new one
    assert {*found} == {False, True}


async def test_everything_is_private_under_any_umask(
    folder: Path, backed_up: Path, tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        back_up(folder, tmp_path / "other")
        restore_backup(tmp_path / "other", tmp_path / "new", replace=False)
    finally:
        os.umask(before)
    for root in (tmp_path / "other", tmp_path / "new"):
        for path in (root, *root.rglob("*")):
            expected = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.stat().st_mode) == expected


@pytest.mark.promise("S4")
async def test_a_backup_goes_only_where_nothing_is(
    folder: Path, backed_up: Path, tmp_path: Path
) -> None:
    before = tree(backed_up)
    with pytest.raises(TargetInUse):
        back_up(folder, backed_up)
    assert tree(backed_up) == before
    with pytest.raises(TargetInUse):
        back_up(folder, folder / "archives" / "backup")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(UnsafeFolder):
            back_up(folder, tmp_path / name)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(NoStore):
        back_up(tmp_path / "nothing", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.promise("S4")
@pytest.mark.parametrize("name", ["restoring", "restored"])
async def test_links_within_the_store_are_not_followed(
    folder: Path, backed_up: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "kept").touch()
    (folder / name).symlink_to(tmp_path / "target")
    with pytest.raises(UnsafeFolder):
        restore_backup(backed_up, folder, replace=True)
    with pytest.raises(UnsafeFolder):
        async with open_store(folder):
            pass
    assert (tmp_path / "target" / "kept").exists()
    (folder / name).unlink()
    (folder / "store.db").rename(tmp_path / "database")
    (folder / "store.db").symlink_to(tmp_path / "database")
    with pytest.raises(Unsafe):
        back_up(folder, tmp_path / "other")
    with pytest.raises(Unsafe):
        restore_backup(backed_up, folder, replace=False)


@pytest.mark.promise("R8")
async def test_an_older_store_is_backed_up_and_a_newer_one_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    """The copy is brought to the present schema; the store stays as it is."""
    os.mkdir(folder, 0o700)
    script = files("recapd.storage").joinpath("migrations", "0001.sql").read_text("utf-8")
    with closing(sqlite3.connect(folder / "store.db")) as db:
        db.executescript(f"{script}; PRAGMA user_version = 1; INSERT INTO store VALUES ('s')")
    before = tree(folder)
    assert back_up(folder, tmp_path / "backup").store_id == "s"
    assert tree(folder) == before
    restore_backup(tmp_path / "backup", tmp_path / "new", replace=False)
    async with open_store(tmp_path / "new") as store:
        assert store.store_id == "s"
    with closing(sqlite3.connect(folder / "store.db")) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(NewerSchema):
        back_up(folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


async def test_the_command_writes_what_the_daemon_can_read(
    folder: Path, backed_up: Path, tmp_path: Path
) -> None:
    """A process of its own, beside one that has the store open (sqlite.org/wal.html)."""
    environment = {"RECAPD_HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}
    async with open_store(folder) as store:
        program = [sys.executable, "-P", "-m", "recapd.daemon", "--data-dir", str(folder)]
        ended = await anyio.run_process(
            [*program, "backup", str(tmp_path / "other")], env=environment, check=False
        )
        assert (ended.returncode, ended.stderr) == (0, b"")
        await store.append("a", [ITEM]).wait()
        refused = await anyio.run_process(
            [*program, "restore-backup", "--replace", str(tmp_path / "other")],
            env=environment,
            check=False,
        )
        assert (refused.returncode, refused.stdout) == (4, b"")
        assert [*await contents(store)] == ["a", "b"]
