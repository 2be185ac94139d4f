"""The Store in plain dictionaries: what `store.py` promises, said as code, for tests.

A change works on a copy of the state, which becomes the state unless the change raises: that is
all there is to atomicity here. It takes effect at the call, so reads see it at once; its events and
its Pending follow on a later turn of the event loop, in the order of the calls.
"""

import copy
import hashlib
import math
import operator
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio
import msgspec
from msgspec import structs

from recapd.storage import errors
from recapd.storage.entry import Entry, encode_entry
from recapd.storage.events import event_body
from recapd.storage.pending import Pending
from recapd.storage.store import (
    NOTHING_EXPECTED,
    AccessToken,
    Appended,
    Event,
    Expect,
    History,
    Kind,
    Listener,
    NewItem,
    NewSession,
    Operation,
    Order,
    Page,
    Query,
    Receipt,
    Replacement,
    Replayed,
    Revision,
    Session,
    SessionChanges,
    Status,
    Store,
    StoreHealth,
    Tokens,
    Verified,
)

T = TypeVar("T")


class _Kept(msgspec.Struct):
    """A session with its present history and its archived revisions, newest first."""

    session: Session
    lines: tuple[bytes, ...] = ()
    calls: frozenset[str] = frozenset()
    revisions: tuple[Revision, ...] = ()

    def set(self, **changes: Any) -> None:
        self.session = structs.replace(self.session, **changes)

    def put(self, history: History) -> None:
        self.lines = tuple(history.lines)
        self.calls = frozenset(history.calls)
        self.set(
            entries=len(self.lines),
            tokens=history.tokens,
            next_entry_id=history.next_entry_id,
        )


class _State(msgspec.Struct):
    """All that a store keeps, and the time and the events of the change that works on it."""

    now_ms: int = 0
    new_events: tuple[Event, ...] = ()
    events: tuple[Event, ...] = ()
    ordinal: int = 0
    sessions: dict[str, _Kept] = {}
    operations: dict[str, tuple[Receipt, Operation]] = {}
    archives: dict[tuple[str, int], tuple[bytes, ...]] = {}  # by session id and revision
    tokens: tuple[AccessToken, ...] = ()

    def copy(self, now_ms: int) -> "_State":
        return structs.replace(
            self,
            now_ms=now_ms,
            new_events=(),
            sessions=self.sessions.copy(),
            operations=self.operations.copy(),
            archives=self.archives.copy(),
        )

    def find(self, session_id: str, expect: Expect = NOTHING_EXPECTED) -> _Kept:
        """The session as this state's own, to be changed in place."""
        if session_id not in self.sessions:
            raise errors.UnknownSession
        kept = self.sessions[session_id] = copy.copy(self.sessions[session_id])
        expect.check(kept.session.revision, kept.session.generation)
        return kept

    def replay(self, receipt: Receipt) -> Replayed | None:
        if receipt.operation_id not in self.operations:
            return None
        known, operation = self.operations[receipt.operation_id]
        if receipt != known:
            raise errors.OperationReused
        return Replayed(operation)

    def emit(
        self, kept: _Kept, method: str, operation_id: str | None, /, **members: object
    ) -> None:
        kept.set(seq=kept.session.seq + 1)
        self.ordinal += 1
        at = kept.session
        body = event_body(
            at.session_id, at.seq, at.revision, at.generation, self.now_ms, operation_id, members
        )
        event = Event(self.ordinal, at.session_id, at.seq, method, body)
        self.events += (event,)
        self.new_events += (event,)

    def add(self, kept: _Kept, items: Sequence[NewItem], operation_id: str | None) -> Appended:
        old = kept.session
        unmatched: list[tuple[int, str]] = []
        for entry_id, item in enumerate(items, start=old.next_entry_id):
            kept.lines += (encode_entry(Entry(entry_id, self.now_ms, item.item)),)
            unmatched += [(entry_id, call) for call in item.outputs if call not in kept.calls]
            kept.calls |= set(item.calls)
        estimated = old.tokens.estimated + sum(item.tokens for item in items)
        kept.set(
            updated_at_ms=self.now_ms,
            revision=old.revision + 1,
            entries=len(kept.lines),
            tokens=Tokens(old.tokens.counted, estimated),
            next_entry_id=old.next_entry_id + len(items),
        )
        first, last = old.next_entry_id, kept.session.next_entry_id - 1
        self.emit(kept, "history.appended", operation_id, first_entry_id=first, last_entry_id=last)
        return Appended(kept.session, first, last, tuple(unmatched))

    def finish(
        self,
        operation_id: str,
        status: Status,
        render: Callable[[Session], bytes],
        /,
        **members: object,
    ) -> None:
        """End the running compaction of that id."""
        receipt, operation = self.operations[operation_id]
        kept = self.find(operation.session_id)
        kept.set(running=None)
        self.emit(kept, "compaction.finished", operation_id, **{"status": status} | members)
        ended = structs.replace(
            operation, status=status, ended_at_ms=self.now_ms, outcome=render(kept.session)
        )
        self.operations[operation_id] = receipt, ended


class MemoryStore(Store):
    """See the module; made by `open_memory_store` only."""

    def __init__(self, now_ms: Callable[[], int], store_id: str) -> None:
        self._now_ms = now_ms
        self._store_id = store_id
        self._state = _State()
        self._listener: Listener = lambda _: None
        outbox = anyio.create_memory_object_stream[Callable[[], None]](math.inf)
        self._outbox, self._sent = outbox
        self._closed = False

    @property
    def store_id(self) -> str:
        return self._store_id

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    # How a change is made.

    async def run(self) -> None:
        """Settle what was handed over, until `close`. A cancel leaves nothing unsettled either."""
        try:
            async for settle in self._sent:
                settle()
        finally:
            with self._sent, suppress(anyio.WouldBlock, anyio.EndOfStream):
                while True:
                    self._sent.receive_nowait()()

    def close(self) -> None:
        """Refuse every further change."""
        self._closed = True
        self._outbox.close()

    def _change(self, change: Callable[[_State], T]) -> Pending[T]:
        pending = Pending[T]()
        if self._closed:
            pending.reject(errors.StoreClosed())
            return pending
        state = self._state.copy(self._now_ms())
        try:
            value = change(state)
        except Exception as error:  # a refusal, or whatever `render` raises
            refusal = error
            self._outbox.send_nowait(lambda: pending.reject(refusal))
            return pending
        self._state = state

        def settle() -> None:
            if state.new_events:
                self._listener(state.new_events)
            pending.resolve(value)

        self._outbox.send_nowait(settle)
        return pending

    def _change_once(
        self,
        session_id: str,
        receipt: Receipt | None,
        render: Callable[[T], bytes] | None,
        change: Callable[[_State, str | None], T],
        status: Status = "completed",
    ) -> Pending[T | Replayed]:
        def run(state: _State) -> T | Replayed:
            if receipt is None:
                return change(state, None)
            operation_id, now_ms = receipt.operation_id, state.now_ms
            if replayed := state.replay(receipt):
                return replayed
            result = change(state, operation_id)
            outcome = None if render is None else render(result)
            ended_at_ms = None if status == "running" else now_ms
            state.operations[operation_id] = (
                receipt,
                Operation(
                    operation_id, receipt.method, session_id, status, now_ms, ended_at_ms, outcome
                ),
            )
            return result

        return self._change(run)

    # Changes.

    def create(
        self,
        new: NewSession,
        items: Sequence[NewItem] = (),
        *,
        history: History | None = None,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes] | None = None,
    ) -> Pending[Session | Replayed]:
        def change(state: _State, operation_id: str | None) -> Session:
            if new.session_id in state.sessions:
                raise errors.SessionExists
            session = Session(
                **structs.asdict(new),
                created_at_ms=state.now_ms,
                updated_at_ms=state.now_ms,
                state="active",
                revision=0,
                generation=0,
                entries=0,
                tokens=Tokens(),
                archived_revisions=(),
                next_entry_id=1,
                seq=max((e.seq for e in state.events if e.session_id == new.session_id), default=0),
                running=None,
            )
            kept = state.sessions[new.session_id] = _Kept(session)
            if history is not None:
                kept.put(history)
            state.emit(kept, "session.created", operation_id)
            if items:
                state.add(kept, items, operation_id)
            return kept.session

        return self._change_once(new.session_id, receipt, render, change)

    def append(
        self,
        session_id: str,
        items: Sequence[NewItem],
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[Appended], bytes] | None = None,
    ) -> Pending[Appended | Replayed]:
        def change(state: _State, operation_id: str | None) -> Appended:
            kept = state.find(session_id, expect)
            if kept.session.state == "archived":
                raise errors.SessionClosed
            return state.add(kept, items, operation_id)

        return self._change_once(session_id, receipt, render, change)

    def update(
        self,
        session_id: str,
        changes: SessionChanges,
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes] | None = None,
    ) -> Pending[Session | Replayed]:
        def change(state: _State, operation_id: str | None) -> Session:
            kept = state.find(session_id, expect)
            new = structs.asdict(changes)
            kept.set(**{name: new[name] for name in new if new[name] is not msgspec.UNSET})
            kept.set(updated_at_ms=state.now_ms)
            state.emit(kept, "session.updated", operation_id)
            return kept.session

        return self._change_once(session_id, receipt, render, change)

    def begin(
        self, session_id: str, receipt: Receipt, *, expect: Expect = NOTHING_EXPECTED
    ) -> Pending[Session | Replayed]:
        def change(state: _State, operation_id: str | None) -> Session:
            kept = state.find(session_id, expect)
            if kept.session.state == "archived":
                raise errors.SessionClosed
            if kept.session.running is not None:
                raise errors.CompactionRunning(kept.session.running)
            kept.set(running=operation_id)
            state.emit(kept, "compaction.started", operation_id)
            return kept.session

        return self._change_once(session_id, receipt, None, change, "running")

    def end(
        self, operation_id: str, status: Status, outcome: bytes, event: dict[str, object]
    ) -> Pending[Operation]:
        def change(state: _State) -> Operation:
            if operation_id not in state.operations:
                raise errors.OperationUnknown
            if state.operations[operation_id][1].status == "running":
                state.finish(operation_id, status, lambda _: outcome, **event)
            return state.operations[operation_id][1]

        return self._change(change)

    def replace(
        self,
        session_id: str,
        change: Replacement,
        *,
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes],
    ) -> Pending[Session | Replayed]:
        archive, operation_id = change.archive, change.operation_id

        def run(state: _State, _: str | None) -> Session:
            kept = state.find(session_id)
            old = kept.session
            if (old.revision, old.generation) != (archive.revision, archive.generation):
                raise errors.Superseded
            if archive.kind == "compaction" and old.running != operation_id:
                raise errors.Superseded  # it was ended, by a cancel for instance
            kept.put(change.history)
            kept.revisions = (archive, *kept.revisions)
            kept.set(
                updated_at_ms=state.now_ms,
                revision=old.revision + 1,
                generation=old.generation + 1,
                archived_revisions=(archive.revision, *old.archived_revisions),
            )
            members: dict[str, object] = {
                "kind": archive.kind,
                "from_generation": old.generation,
                "to_generation": kept.session.generation,
                "archived_revision": archive.revision,
                "entries_before": old.entries,
                "entries_after": kept.session.entries,
            }
            state.emit(kept, "history.replaced", operation_id, **members | change.event)
            if old.running == operation_id:
                state.finish(operation_id, "completed", render, **change.finished)
            return state.sessions[session_id].session

        return self._change_once(session_id, receipt, render, run)

    def keep(
        self, session_id: str, receipt: Receipt, *, render: Callable[[Session], bytes]
    ) -> Pending[Session | Replayed]:
        def change(state: _State, _: str | None) -> Session:
            return state.find(session_id).session

        return self._change_once(session_id, receipt, render, change)

    def delete(
        self,
        session_id: str,
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[bool], bytes] | None = None,
        ended: bytes = b"{}",
    ) -> Pending[bool | Replayed]:
        def change(state: _State, operation_id: str | None) -> bool:
            if session_id not in state.sessions:
                return False
            running = state.find(session_id, expect).session.running
            if running is not None:
                state.finish(running, "cancelled", lambda _: ended, reason="session_deleted")
            state.emit(state.find(session_id), "session.deleted", operation_id)
            *earlier, deleted = state.events
            state.events = (*(e for e in earlier if e.session_id != session_id), deleted)
            state.archives = {k: v for k, v in state.archives.items() if k[0] != session_id}
            del state.sessions[session_id]
            return True

        return self._change_once(session_id, receipt, render, change)

    def add_token(self, token: AccessToken) -> Pending[None]:
        def change(state: _State) -> None:
            kept = [one for one in state.tokens if (one.expires_at_ms or math.inf) > state.now_ms]
            state.tokens = (*kept, token)

        return self._change(change)

    def remove_tokens(self, token_ids: Sequence[str]) -> Pending[None]:
        def change(state: _State) -> None:
            state.tokens = tuple(one for one in state.tokens if one.token_id not in token_ids)

        return self._change(change)

    # Archives.

    async def archive(self, session: Session, kind: Kind, operation_id: str) -> Revision:
        kept = self._state.find(session.session_id)
        if kept.session.revision != session.revision:
            raise errors.Superseded
        self._state.archives[session.session_id, session.revision] = kept.lines
        content = b"".join(line + b"\n" for line in kept.lines)
        return Revision(
            session.revision,
            session.generation,
            kind,
            operation_id,
            archived_at_ms=self._now_ms(),
            entries=len(kept.lines),
            tokens=session.tokens,
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
        )

    async def discard_archive(self, session_id: str, revision: int) -> None:
        kept = self._state.sessions.get(session_id)
        if kept is None or revision not in kept.session.archived_revisions:
            self._state.archives.pop((session_id, revision), None)

    # Reads.

    async def session(self, session_id: str) -> Session:
        return self._state.find(session_id).session

    async def sessions(self, query: Query) -> list[Session]:
        key = "session_id" if query.sort == "session_id" else f"{query.sort}_ms"
        part = None if query.title_contains is None else query.title_contains.lower()
        behind = operator.gt if query.order == "asc" else operator.lt

        def place(session: Session) -> tuple[Any, str]:
            return getattr(session, key), session.session_id

        def asked_for(session: Session) -> bool:
            at_ms = session.updated_at_ms
            return (
                query.state in (None, session.state)
                and query.cwd in (None, session.cwd)
                and query.labels.items() <= session.labels.items()
                and (part is None or (session.title is not None and part in session.title.lower()))
                and (query.updated_after_ms is None or at_ms > query.updated_after_ms)
                and (query.updated_before_ms is None or at_ms < query.updated_before_ms)
                and (query.only is None or session.session_id in query.only)
                and (query.after is None or behind(place(session), query.after))
            )

        found = filter(asked_for, [kept.session for kept in self._state.sessions.values()])
        return sorted(found, key=place, reverse=query.order == "desc")[: query.limit]

    async def revisions(self, session_id: str) -> list[Revision]:
        return list(self._state.find(session_id).revisions)

    async def page(
        self,
        session_id: str,
        *,
        revision: int | None = None,
        generation: int | None = None,
        start: int | None = None,
        total: int | None = None,
        limit: int,
        bytes_max: int,
        order: Order = "asc",
    ) -> Page:
        kept = self._state.find(session_id)
        session, lines = kept.session, kept.lines
        at = session.revision, session.generation
        if revision not in (None, at[0]) or generation not in (None, at[1]):
            asked = (revision, generation)
            for archived in kept.revisions:
                at = archived.revision, archived.generation
                if asked in ((at[0], None), (None, at[1]), at):
                    break
            else:
                raise errors.RevisionUnknown(revision)
            lines = self._state.archives[session_id, at[0]]
        lines = lines[:total]
        if order == "asc":
            indexes = [i for i in range(len(lines)) if start is None or i >= start]
        else:
            indexes = [i for i in reversed(range(len(lines))) if start is None or i <= start]
        entries: list[bytes] = []
        bytes_left = bytes_max
        for index in indexes:
            bytes_left -= len(lines[index]) + 1  # with its line end
            if entries and (len(entries) == limit or bytes_left < 0):
                return Page(session, *at, len(lines), entries, next_index=index)
            entries.append(lines[index])
        return Page(session, *at, len(lines), entries, next_index=None)

    async def events(self, session_id: str, *, after_seq: int, limit: int) -> list[Event]:
        of_session = (e for e in self._state.events if e.session_id == session_id)
        return [e for e in of_session if e.seq > after_seq][:limit]

    async def events_of_all(self, *, after_ordinal: int, limit: int) -> list[Event]:
        return [e for e in self._state.events if e.ordinal > after_ordinal][:limit]

    async def last_ordinal(self) -> int:
        return self._state.ordinal

    async def operation(self, operation_id: str) -> Operation:
        if operation_id not in self._state.operations:
            raise errors.OperationUnknown
        return self._state.operations[operation_id][1]

    async def replayed(self, receipt: Receipt) -> Replayed | None:
        return self._state.replay(receipt)

    async def tokens(self) -> list[AccessToken]:
        return sorted(self._state.tokens, key=lambda one: (one.created_at_ms, one.token_id))

    async def verify(self, session_id: str, *, read: Callable[[int], bool]) -> Verified:
        kept = self._state.find(session_id)
        lines = [*kept.lines] if read(kept.session.revision) else []
        for revision in kept.revisions:
            if read(revision.revision):
                lines += self._state.archives[session_id, revision.revision]
        return Verified(1 + len(kept.revisions), sum(map(len, lines)), [])

    async def health(self) -> StoreHealth:
        return StoreHealth(not self._closed, False, False, 0, 0, 0, waiting_changes=0)


@asynccontextmanager
async def open_memory_store(
    *,
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    store_id: str = "memory",
) -> AsyncGenerator[MemoryStore]:
    """An empty store, closed at the end of the block: every Pending is settled by then."""
    store = MemoryStore(now_ms, store_id)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        try:
            yield store
        finally:
            store.close()
