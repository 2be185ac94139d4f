"""The Store in plain dictionaries: what `store.py` promises, said as code. For tests; nothing is durable.

A change works on a copy of the whole state, which becomes the state unless the change is refused:
that is all there is to atomicity here. It takes effect at the call, so reads see it at once; its
events and its Pending follow on a later turn of the event loop, in the order of the calls.
"""

import hashlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import anyio
import msgspec
from msgspec import structs

from recapd.storage.entry import Entry, encode_entry
from recapd.storage.errors import (
    ArchiveMissing,
    CompactionRunning,
    Conflict,
    OperationReused,
    OperationUnknown,
    RevisionUnknown,
    SessionClosed,
    SessionExists,
    StoreClosed,
    StoreError,
    Superseded,
    UnknownSession,
)
from recapd.storage.events import event_body
from recapd.storage.pending import Pending
from recapd.storage.store import (
    NOTHING_EXPECTED,
    Appended,
    Event,
    Expect,
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
    Tokens,
)

T = TypeVar("T")


class _Kept(msgspec.Struct, frozen=True):
    """A session with its present history and its archived revisions, newest first."""

    session: Session
    lines: tuple[bytes, ...] = ()
    calls: frozenset[str] = frozenset()
    revisions: tuple[Revision, ...] = ()


class _State(msgspec.Struct):
    """Everything that a store keeps, and the events that the present change adds to it."""

    now_ms: int = 0  # of the present change
    ordinal: int = 0
    sessions: dict[str, _Kept] = {}
    operations: dict[str, tuple[Receipt, Operation]] = {}
    events: tuple[Event, ...] = ()
    new_events: tuple[Event, ...] = ()

    def find(self, session_id: str, expect: Expect = NOTHING_EXPECTED) -> _Kept:
        if session_id not in self.sessions:
            raise UnknownSession
        kept = self.sessions[session_id]
        at = kept.session
        if Expect(
            at.revision if expect.revision is None else expect.revision,
            at.generation if expect.generation is None else expect.generation,
        ) != Expect(at.revision, at.generation):
            raise Conflict(at.revision, at.generation)
        return kept

    def keep(
        self, kept: _Kept, method: str, operation_id: str | None, /, **members: object
    ) -> Session:
        """Put a changed session in its place, with the event that says so."""
        self.ordinal += 1
        session = structs.replace(kept.session, seq=kept.session.seq + 1)
        self.sessions[session.session_id] = structs.replace(kept, session=session)
        body = event_body(
            session.session_id,
            session.seq,
            session.revision,
            session.generation,
            self.now_ms,
            operation_id,
            members,
        )
        self.new_events += (Event(self.ordinal, session.session_id, session.seq, method, body),)
        return session

    def add(self, kept: _Kept, items: Sequence[NewItem], operation_id: str | None) -> Appended:
        """Append the items."""
        first_id = kept.session.next_entry_id
        lines, calls, unmatched = list(kept.lines), set(kept.calls), list[tuple[int, str]]()
        for entry_id, item in enumerate(items, start=first_id):
            lines.append(encode_entry(Entry(entry_id, self.now_ms, item.item)))
            unmatched += [(entry_id, call) for call in item.outputs if call not in calls]
            calls.update(item.calls)
        tokens = kept.session.tokens
        session = structs.replace(
            kept.session,
            updated_at_ms=self.now_ms,
            revision=kept.session.revision + 1,
            entries=len(lines),
            tokens=Tokens(tokens.counted, tokens.estimated + sum(item.tokens for item in items)),
            next_entry_id=first_id + len(items),
        )
        last_id = session.next_entry_id - 1
        session = self.keep(
            structs.replace(kept, session=session, lines=tuple(lines), calls=frozenset(calls)),
            "history.appended",
            operation_id,
            first_entry_id=first_id,
            last_entry_id=last_id,
        )
        return Appended(session, first_id, last_id, tuple(unmatched))

    def finish(
        self,
        operation_id: str,
        status: Status,
        render: Callable[[Session], bytes],
        /,
        **members: object,
    ) -> Session:
        """End the compaction that runs."""
        receipt, operation = self.operations[operation_id]
        kept = self.sessions[operation.session_id]
        session = self.keep(
            structs.replace(kept, session=structs.replace(kept.session, running=None)),
            "compaction.finished",
            operation_id,
            **{"status": status} | members,
        )
        self.operations[operation_id] = (
            receipt,
            structs.replace(
                operation, status=status, ended_at_ms=self.now_ms, outcome=render(session)
            ),
        )
        return session


class MemoryStore(Store):
    """See the module. Made by `open_memory_store`."""

    def __init__(self, now_ms: Callable[[], int], store_id: str) -> None:
        self._now_ms = now_ms
        self._store_id = store_id
        self._state = _State()
        self._archives: dict[tuple[str, int], tuple[bytes, ...]] = {}  # by session and revision
        self._listener: Listener = lambda _: None
        self._settle, self._to_settle = anyio.create_memory_object_stream[Callable[[], None]](
            math.inf
        )
        self._closed = False

    @property
    def store_id(self) -> str:
        return self._store_id

    def listen(self, listener: Listener) -> None:
        self._listener = listener

    # How a change is made.

    async def run(self) -> None:
        """Settle what was handed over, until `close`; a cancel leaves nothing unsettled either."""
        try:
            async for settle in self._to_settle:
                settle()
        finally:
            with suppress(anyio.WouldBlock, anyio.EndOfStream), self._to_settle:
                while True:
                    self._to_settle.receive_nowait()()

    def close(self) -> None:
        """Refuse every further change."""
        self._closed = True
        self._settle.close()

    def _change(self, change: Callable[[_State], T]) -> Pending[T]:
        pending = Pending[T]()
        if self._closed:
            pending.reject(StoreClosed())
            return pending
        now = self._state
        state = _State(
            self._now_ms(), now.ordinal, now.sessions.copy(), now.operations.copy(), now.events
        )
        try:
            value = change(state)
        except StoreError as error:
            refusal = error
            self._settle.send_nowait(lambda: pending.reject(refusal))
            return pending
        state.events += state.new_events
        self._state = state

        def settle() -> None:
            if state.new_events:
                self._listener(state.new_events)
            pending.resolve(value)

        self._settle.send_nowait(settle)
        return pending

    def _change_once(
        self,
        session_id: str,
        receipt: Receipt | None,
        render: Callable[[T], bytes] | None,
        change: Callable[[_State], T],
        status: Status = "completed",
    ) -> Pending[T | Replayed]:
        def run(state: _State) -> T | Replayed:
            if receipt is None:
                return change(state)
            if receipt.operation_id in state.operations:
                known, operation = state.operations[receipt.operation_id]
                if receipt != known:
                    raise OperationReused
                return Replayed(operation)
            result = change(state)
            state.operations[receipt.operation_id] = (
                receipt,
                Operation(
                    receipt.operation_id,
                    receipt.method,
                    session_id,
                    status,
                    started_at_ms=state.now_ms,
                    ended_at_ms=state.now_ms if status == "completed" else None,
                    outcome=None if render is None else render(result),
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
        receipt: Receipt | None = None,
        render: Callable[[Session], bytes] | None = None,
    ) -> Pending[Session | Replayed]:
        def change(state: _State) -> Session:
            session_id = new.session_id
            if session_id in state.sessions:
                raise SessionExists
            session = Session(
                session_id,
                new.title,
                new.cwd,
                new.labels,
                created_at_ms=state.now_ms,
                updated_at_ms=state.now_ms,
                durability=new.durability,
                state="active",
                revision=0,
                generation=0,
                entries=0,
                tokens=Tokens(),
                archived_revisions=(),
                next_entry_id=1,
                seq=max((e.seq for e in state.events if e.session_id == session_id), default=0),
                running=None,
            )
            session = state.keep(_Kept(session), "session.created", _id(receipt))
            if items:
                session = state.add(state.find(session_id), items, _id(receipt)).session
            return session

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
        def change(state: _State) -> Appended:
            kept = state.find(session_id, expect)
            if kept.session.state == "archived":
                raise SessionClosed
            return state.add(kept, items, _id(receipt))

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
        new = {
            name: value
            for name, value in structs.asdict(changes).items()
            if value is not msgspec.UNSET
        }

        def change(state: _State) -> Session:
            kept = state.find(session_id, expect)
            session = structs.replace(kept.session, updated_at_ms=state.now_ms, **new)
            kept = structs.replace(kept, session=session)
            return state.keep(kept, "session.updated", _id(receipt))

        return self._change_once(session_id, receipt, render, change)

    def begin(
        self, session_id: str, receipt: Receipt, *, expect: Expect = NOTHING_EXPECTED
    ) -> Pending[Session | Replayed]:
        def change(state: _State) -> Session:
            kept = state.find(session_id, expect)
            if kept.session.state == "archived":
                raise SessionClosed
            if kept.session.running is not None:
                raise CompactionRunning(kept.session.running)
            session = structs.replace(kept.session, running=receipt.operation_id)
            kept = structs.replace(kept, session=session)
            return state.keep(kept, "compaction.started", receipt.operation_id)

        return self._change_once(session_id, receipt, None, change, status="running")

    def end(
        self, operation_id: str, status: Status, outcome: bytes, event: dict[str, object]
    ) -> Pending[Operation]:
        def change(state: _State) -> Operation:
            if operation_id not in state.operations:
                raise OperationUnknown
            if state.operations[operation_id][1].status == "running":
                state.finish(operation_id, status, lambda _: outcome, **event)
            return state.operations[operation_id][1]

        return self._change(change)

    def replace(
        self, session_id: str, change: Replacement, *, render: Callable[[Session], bytes]
    ) -> Pending[Session]:
        archive, operation_id = change.archive, change.operation_id

        def run(state: _State) -> Session:
            kept = state.find(session_id)
            old = kept.session
            if (old.revision, old.generation) != (archive.revision, archive.generation):
                raise Superseded
            if archive.kind == "compaction" and old.running != operation_id:
                raise Superseded  # it was ended, by a cancel for instance
            new = structs.replace(
                old,
                updated_at_ms=state.now_ms,
                revision=old.revision + 1,
                generation=old.generation + 1,
                entries=len(change.history),
                tokens=change.tokens,
                archived_revisions=(old.revision, *old.archived_revisions),
                next_entry_id=change.next_entry_id,
            )
            lines = tuple(map(encode_entry, change.history))
            new = state.keep(
                _Kept(new, lines, frozenset(change.calls), (archive, *kept.revisions)),
                "history.replaced",
                operation_id,
                kind=archive.kind,
                from_generation=old.generation,
                to_generation=new.generation,
                archived_revision=old.revision,
                entries_before=old.entries,
                entries_after=new.entries,
                **change.event,
            )
            if new.running == operation_id:
                new = state.finish(operation_id, "completed", render)
            return new

        return self._change(run)

    def delete(
        self,
        session_id: str,
        *,
        expect: Expect = NOTHING_EXPECTED,
        receipt: Receipt | None = None,
        render: Callable[[bool], bytes] | None = None,
    ) -> Pending[bool | Replayed]:
        def change(state: _State) -> bool:
            if session_id not in state.sessions:
                return False
            running = state.find(session_id, expect).session.running
            if running is not None:
                state.finish(running, "cancelled", lambda _: b"{}", reason="session_deleted")
            state.keep(state.find(session_id), "session.deleted", _id(receipt))
            ...
            return True

        return self._change_once(session_id, receipt, render, change)
