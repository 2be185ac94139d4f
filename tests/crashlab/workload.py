"""What the store is made to do while its calls are recorded, and what it must show after any part
of that.

The story is a list of acts; each makes one change of the store or more. It is told to the real
store, and to the store in memory, which is the specification: what that one shows after so many
changes is what the real one must show after a power cut, once it is opened again.
"""

import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from importlib.resources import files
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import structs

from recapd.storage.entry import Entry, Reminder, encode_entry
from recapd.storage.errors import OperationUnknown
from recapd.storage.memory import open_memory_store
from recapd.storage.pending import Pending
from recapd.storage.sqlite import open_store
from recapd.storage.store import (
    History,
    Kind,
    NewItem,
    NewSession,
    Operation,
    Page,
    Query,
    Receipt,
    Replacement,
    Revision,
    Session,
    SessionChanges,
    Store,
    Tokens,
)

T = TypeVar("T")

START_MS: Final = 1_796_083_200_000  # 2026-12-01T00:00:00Z
RECOVERED_MS: Final = START_MS + 3_600_000
INTERRUPTED: Final = b'{"reason":"interrupted"}'


class Clock:
    """Shows the time that it was set to."""

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class Stop(Exception):
    """So many changes were to be made, and are."""


class Player:
    """Makes the changes of acts one after the other, from number `done` on.

    `mark` hears "B 7" when the seventh is handed over and "A 7" when it is durable. Each change has
    a second of its own on the clock.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        *,
        done: int = 0,
        until: int | None = None,
        mark: Callable[[str], None] = lambda _: None,
        suffix: str = "",
    ) -> None:
        self.store = store
        self.done = done
        self.suffix = suffix  # of operation ids
        self._clock = clock
        self._until = until
        self._mark = mark
        store.listen(lambda _: mark(f"A {self.done + 1}"))  # an event tells of its change

    async def change(self, make: Callable[[], Pending[T]]) -> T:
        """Make the next change. Raises Stop if it is not to be made."""
        if self.done == self._until:
            raise Stop
        number = self.done + 1
        self._clock.now_ms = START_MS + 1000 * number
        self._mark(f"B {number}")
        result = await make().wait()
        self._mark(f"A {number}")
        self.done = number
        return result

    # What acts are made of.

    async def create(self, session_id: str, *texts: str, history: History | None = None) -> None:
        await self.change(
            lambda: self.store.create(NewSession(session_id), items(*texts), history=history)
        )

    async def append(self, session_id: str, *texts: str) -> None:
        operation_id = f"append-{self.done}{self.suffix}"
        receipt = Receipt(operation_id, "session.append", b"")
        await self.change(
            lambda: self.store.append(session_id, items(*texts), receipt=receipt, render=done)
        )

    async def begin(self, session_id: str, operation_id: str) -> Session:
        receipt = Receipt(operation_id, "session.compact", b"")
        await self.change(lambda: self.store.begin(session_id, receipt))
        return await self.session(session_id)

    async def session(self, session_id: str) -> Session:
        return await self.store.session(session_id)

    async def page(self, session_id: str, revision: int) -> Page:
        return await self.store.page(session_id, revision=revision, limit=100, bytes_max=1 << 20)

    async def archive(self, session: Session, kind: Kind, operation_id: str) -> Revision:
        return await self.store.archive(session, kind, operation_id)

    async def replace(
        self, session: Session, kind: Kind, operation_id: str, entries: Sequence[Entry]
    ) -> None:
        archive = await self.archive(session, kind, operation_id)
        next_entry_id = max([session.next_entry_id, *(entry.entry_id + 1 for entry in entries)])
        history = History([*map(encode_entry, entries)], [], next_entry_id, Tokens(7, 0))
        change = Replacement(operation_id, archive, history, {"retained_entry_ids": [1]})
        receipt = None if kind == "compaction" else Receipt(operation_id, f"session.{kind}", b"")
        await self.change(
            lambda: self.store.replace(session.session_id, change, receipt=receipt, render=done)
        )

    async def compact(self, session_id: str) -> None:
        operation_id = f"compact-{self.done}{self.suffix}"
        session = await self.begin(session_id, operation_id)
        provenance = Reminder(session.generation + 1, operation_id, session.revision)
        item = b'{"role":"user","content":"<system-reminder>so far</system-reminder>"}'
        entry = Entry(session.next_entry_id, START_MS, item, provenance)
        await self.replace(session, "compaction", operation_id, [entry])


def done(_: object) -> bytes:
    return b'{"done":true}'


def items(*texts: str) -> list[NewItem]:
    return [
        NewItem(msgspec.json.encode({"role": "user", "content": text}), len(text)) for text in texts
    ]


# The story.


async def _begin(play: Player) -> None:
    await play.create("a", "first", "second")


async def _append(play: Player) -> None:
    await play.append("a", "third")


async def _append_more(play: Player) -> None:
    await play.append("b", "x" * 6000, "y")


async def _second_session(play: Player) -> None:
    await play.create("b", "of b")


async def _compact(play: Player) -> None:
    await play.compact("a")


async def _compact_other(play: Player) -> None:
    await play.compact("b")


async def _update(play: Player) -> None:
    changes = SessionChanges(title="a title", labels={"k": "v"})
    await play.change(lambda: play.store.update("a", changes))


async def _first_archived(play: Player) -> Page:
    revision = (await play.session("a")).archived_revisions[-1]
    return await play.page("a", revision)


async def _fork(play: Player) -> None:
    page = await _first_archived(play)
    await play.create("c", history=History(page.entries, [], 4, Tokens(3, 0)))


async def _restore(play: Player) -> None:
    session = await play.session("a")
    page = await _first_archived(play)
    entries = [
        Entry(number + 1, START_MS, line[line.index(b',"item":') + 8 : -1])
        for number, line in enumerate(page.entries)
    ]
    await play.replace(session, "restore", f"restore-{play.done}{play.suffix}", entries)


async def _rewind(play: Player) -> None:
    session = await play.session("b")
    await play.replace(session, "rewind", f"rewind-{play.done}{play.suffix}", [])


async def _fail(play: Player) -> None:
    operation_id = f"fail-{play.done}{play.suffix}"
    await play.begin("a", operation_id)
    await play.change(
        lambda: play.store.end(operation_id, "failed", b'{"reason":"x"}', {"reason": "x"})
    )


async def _delete(play: Player) -> None:
    await play.change(lambda: play.store.delete("b"))


async def _again(play: Player) -> None:
    await play.create("b", "another b")


Act = Callable[[Player], Awaitable[None]]
LIVES: Final[tuple[tuple[Act, ...], ...]] = (
    (_begin, _append, _append, _compact, _second_session, _append_more, _update, _fork),
    (_append, _compact_other, _restore, _rewind, _fail, _delete, _again, _append, _compact),
)
"""The acts of each life of the process that writes: in between it closes the store."""


SHORT: Final[tuple[Act, ...]] = (_begin, _second_session, _append, _compact, _restore, _delete)
"""One of everything that may fail in a way of its own."""


async def play(player: Player, acts: Sequence[Act]) -> bool:
    """Whether all acts were made, and not only the changes that were wanted."""
    try:
        for act in acts:
            await act(player)
    except Stop:
        return False
    return True


# What is seen.


async def look(store: Store) -> bytes:
    """All that a store shows, as JSON; see `see`."""
    return msgspec.json.encode(await see(store))


async def see(store: Store) -> list[object]:
    """All that a store shows. The size and hash of archive files are left out: their
    format is each store's own. Reading an archived revision verifies the whole file.
    """
    events = await store.events_of_all(after_ordinal=0, limit=10_000)
    names = [msgspec.json.decode(event.body, type=_OfAnEvent).operation_id for event in events]
    seen: list[object] = [events, await store.last_ordinal()]
    for session in await store.sessions(Query(sort="session_id", order="asc")):
        revisions = await store.revisions(session.session_id)
        seen += [session, [structs.replace(one, bytes=0, sha256="") for one in revisions]]
        for revision in (None, *session.archived_revisions):
            seen.append(
                await store.page(
                    session.session_id, revision=revision, limit=1000, bytes_max=1 << 20
                )
            )
    for name in dict.fromkeys(names):
        if name is not None:
            seen.append(await _operation(store, name))
    return seen


class _OfAnEvent(msgspec.Struct):
    operation_id: str | None = None


async def _operation(store: Store, operation_id: str) -> Operation | None:
    try:
        return await store.operation(operation_id)
    except OperationUnknown:
        return None


async def settle(store: Store) -> None:
    """What a start does to compactions that an earlier life did not end."""
    for session in await store.sessions(Query()):
        if session.running is not None:
            ended = {"reason": "interrupted"}
            await store.end(session.running, "failed", INTERRUPTED, dict(ended)).wait()


async def go_on(store: Store, clock: Clock, done: int) -> bytes:
    """Tell the rest of the story to a store that has `done` changes of it; what it shows then.

    An act that was cut is made again, as a new operation.
    """
    starts = await act_starts()
    for act, start, end in starts:
        if end > done:
            player = Player(store, clock, done=start, suffix="-again" if start < done else "")
            await act(player)
    return await look(store)


async def act_starts() -> list[tuple[Act, int, int]]:
    """Each act with the numbers of changes before it and after it."""
    starts: list[tuple[Act, int, int]] = []
    clock = Clock()
    async with open_memory_store(now_ms=clock) as store:
        player = Player(store, clock)
        for life in LIVES:
            for act in life:
                before = player.done
                await act(player)
                starts.append((act, before, player.done))
    return starts


async def live(acts: Sequence[Act], done: int) -> bytes:
    """What there is to be seen after `done` changes of these acts."""
    clock = Clock()
    async with open_memory_store(now_ms=clock) as store:
        await play(Player(store, clock, until=done), acts)
        return await look(store)


async def expected(done: int, *, to_the_end: bool = False) -> bytes:
    """What must be there after `done` changes, a power cut, and a start at RECOVERED_MS; or after
    the rest of the story on top of it.
    """
    clock = Clock()
    async with open_memory_store(now_ms=clock) as store:
        player = Player(store, clock, until=done)
        for life in LIVES:
            if not await play(player, life):
                break
        clock.now_ms = RECOVERED_MS
        await settle(store)
        return await go_on(store, clock, done) if to_the_end else await look(store)


OLDER: Final = LIVES[0][:-1]
"""What an older recapd could do: no forks."""


async def make_older_store(folder: Path) -> int:
    """A store of schema 1 as an older recapd left it, closed. Returns how many changes it has."""
    clock = Clock()
    async with open_store(folder, now_ms=clock) as store:
        player = Player(store, clock)
        await play(player, OLDER)
    with closing(sqlite3.connect(folder / "store.db", isolation_level=None)) as db:
        for column in ("parent", "auto_compact"):  # what schema 2 added
            db.execute(f"ALTER TABLE sessions DROP COLUMN {column}")
        db.execute("DROP TABLE access_tokens")  # and schema 3
        db.execute("PRAGMA user_version=1")
        with closing(sqlite3.connect(":memory:")) as older:
            script = files("recapd.storage").joinpath("migrations", "0001.sql").read_text("utf-8")
            older.executescript(script)
            assert _columns(db) == _columns(older)
    return player.done


def _columns(db: sqlite3.Connection) -> list[tuple[object, ...]]:
    return db.execute(
        "SELECT made.name, made.type, found.* FROM sqlite_schema AS made,"
        " pragma_table_info(made.name) AS found ORDER BY made.name, found.cid"
    ).fetchall()
