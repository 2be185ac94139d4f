"""What the contract tests stand on: every Store, a clock to move, and a look at everything."""

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from msgspec import structs

from recapd.storage.entry import Entry, encode_entry
from recapd.storage.errors import OperationUnknown
from recapd.storage.memory import open_memory_store
from recapd.storage.sqlite import open_store
from recapd.storage.store import (
    Event,
    History,
    Kind,
    Operation,
    Query,
    Receipt,
    Replacement,
    Session,
    Store,
    Tokens,
)

START_MS = 1_796_083_200_000  # 2026-12-01T00:00:00Z
NO_TOKENS = Tokens()


@pytest.fixture
def advance() -> Callable[[int], int]:
    """Moves the clock of every store on by so many milliseconds, and says what it shows then."""
    now_ms = START_MS

    def advance(ms: int) -> int:
        nonlocal now_ms
        now_ms += ms
        return now_ms

    return advance


@pytest.fixture(params=["memory", "sqlite"])
def open_new(
    request: pytest.FixtureRequest, tmp_path: Path, advance: Callable[[int], int]
) -> Callable[[], AbstractAsyncContextManager[Store]]:
    """Opens a new, empty store at each call."""
    numbers = itertools.count()

    def open_new() -> AbstractAsyncContextManager[Store]:
        if request.param == "memory":
            return open_memory_store(now_ms=lambda: advance(0))
        return open_store(tmp_path / f"store-{next(numbers)}", now_ms=lambda: advance(0))

    return open_new


@pytest.fixture
async def store(
    open_new: Callable[[], AbstractAsyncContextManager[Store]],
) -> AsyncGenerator[Store]:
    async with open_new() as store:
        yield store


@pytest.fixture
def heard(store: Store) -> list[Event]:
    """The events that the listener was given, in order."""
    events: list[Event] = []
    store.listen(events.extend)
    return events


@pytest.fixture
def look() -> Callable[..., Awaitable[dict[str, object]]]:
    """Reads all that a store shows, to compare it with an earlier look or with another store.

    The size and hash of an archive file are left out: its format is each store's own.
    """

    async def look(store: Store, *operation_ids: str) -> dict[str, object]:
        seen: dict[str, object] = {
            "sessions": await store.sessions(Query(sort="session_id")),
            "events": await store.events_of_all(after_ordinal=0, limit=1000),
            "last_ordinal": await store.last_ordinal(),
        }
        for session in await store.sessions(Query()):
            name = session.session_id
            revisions = await store.revisions(name)
            assert session == await store.session(name)
            seen[f"{name} revisions"] = [structs.replace(r, bytes=0, sha256="") for r in revisions]
            for revision in (None, *session.archived_revisions):
                page = await store.page(name, revision=revision, limit=1000, bytes_max=1 << 20)
                seen[f"{name} at {revision}"] = page
        operations: list[Operation | None] = []
        for operation_id in operation_ids:
            try:
                operations.append(await store.operation(operation_id))
            except OperationUnknown:
                operations.append(None)
        seen["operations"] = operations
        return seen

    return look


@pytest.fixture
def replace_history() -> Callable[..., Awaitable[Session]]:
    """Archives and replaces the present history, with `begin` before it when it is a compaction."""

    async def replace_history(
        store: Store,
        session_id: str,
        operation_id: str,
        history: Sequence[Entry] = (),
        *,
        kind: Kind = "compaction",
        calls: Sequence[str] = (),
        tokens: Tokens = NO_TOKENS,
        event: dict[str, object] | None = None,
        finished: dict[str, object] | None = None,
    ) -> Session:
        session = await store.session(session_id)
        if kind == "compaction" and session.running != operation_id:
            receipt = Receipt(operation_id, "session.compact", b"")
            await store.begin(session_id, receipt).wait()
        archive = await store.archive(session, kind, operation_id)
        next_entry_id = max([session.next_entry_id, *(e.entry_id + 1 for e in history)])
        change = Replacement(
            operation_id,
            archive,
            History([*map(encode_entry, history)], calls, next_entry_id, tokens),
            event or {},
            finished or {},
        )
        replaced = await store.replace(session_id, change, render=lambda _: b"{}").wait()
        assert isinstance(replaced, Session)
        return replaced

    return replace_history
