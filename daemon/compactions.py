"""Running compactions: beside the session's actor until the commit, within it from there on.

begin (in the actor) → read, divide, summarise, check (nothing held, appends go on, cancellable) →
commit (in the actor, not cancellable): archive, then one transaction. DESIGN.md §1 has the order;
`storage/` does the syncing.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio
import msgspec
from anyio.abc import TaskGroup

from recapd.daemon.actor import Actors
from recapd.daemon.compaction import pipeline
from recapd.daemon.compaction.summarise.base import Summariser
from recapd.daemon.compaction.tokens import count_tokens_of
from recapd.daemon.dispatch import rpc_error
from recapd.daemon.histories import put_in_place, read_pages
from recapd.daemon.redaction import Redactor
from recapd.daemon.signal import Signal
from recapd.daemon.subscriptions import Subscriptions
from recapd.daemon.wire import wire_session, wire_tokens
from recapd.protocol import messages
from recapd.protocol.errors import (
    BreakerOpen,
    Cancelled,
    NoGain,
    NothingToCompact,
    RpcError,
    Superseded,
    from_wire,
)
from recapd.protocol.errors import OutcomeUnknown as OutcomeUnknownError
from recapd.protocol.errors import StorageError as StorageFailed
from recapd.protocol.items import item_facts
from recapd.protocol.messages import (
    ArchiveInfo,
    CompactionPlan,
    CompactResult,
    PlannedPart,
    PlannedRequest,
)
from recapd.storage.entry import Entry, Reminder, decode_entry, encode_entry
from recapd.storage.errors import OutcomeUnknown, SessionClosed, StorageError, StoreError
from recapd.storage.pending import Pending
from recapd.storage.store import (
    Expect,
    History,
    Operation,
    Receipt,
    Replacement,
    Replayed,
    Revision,
    Session,
    Status,
    Store,
    Tokens,
)

logger = logging.getLogger("recapd.compaction")

_PROGRESS_INTERVAL_S: Final = 0.1  # PROTOCOL.md §4: at most ten a second
_END_TIMEOUT_S: Final = 10.0

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class Compaction:
    """One compaction that was asked for. `begun` settles first, `ended` when the operation has an
    outcome.

    `ended` has the result as JSON, or the error.
    """

    operation_id: str
    session_id: str
    summarise: Summariser
    settings: pipeline.Settings
    force: bool
    redactor: Redactor | None  # None: what is summarised may hold secrets
    must_shrink: bool
    begun: "Pending[Session | Replayed]"
    ended: "Pending[bytes]" = field(default_factory=lambda: Pending[bytes]())
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    cancelled: RpcError = field(default_factory=Cancelled)  # what it ends with, if it is
    tokens_after: int = 0  # of the new history but for what was appended meanwhile, once prepared


@dataclass(frozen=True, slots=True)
class Unsettled:
    """How an operation ended that the store could not be told."""

    operation_id: str
    status: Status
    outcome: bytes
    members: dict[str, object]


class Compactions:
    """All compactions of the process, each in a task of `tasks`."""

    def __init__(
        self,
        store: Store,
        actors: Actors,
        subscriptions: Subscriptions,
        tasks: TaskGroup,
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._actors = actors
        self._subscriptions = subscriptions
        self._tasks = tasks
        self._now_ms = now_ms
        self.ended = Signal()  # a compaction has
        self._running: dict[str, Compaction] = {}
        self._unsettled: dict[str, Unsettled] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(
        self,
        session_id: str,
        receipt: Receipt,
        expect: Expect,
        *,
        summarise: Summariser,
        settings: pipeline.Settings,
        force: bool,
        redactor: Redactor | None,
        must_shrink: bool = False,
    ) -> Compaction:
        """Hand over the beginning. The compaction then goes on by itself, whoever waits for it or
        does not.

        `must_shrink`: it ends as `no_gain` where the new history would not have fewer tokens.
        """
        compaction = Compaction(
            receipt.operation_id,
            session_id,
            summarise,
            settings,
            force,
            redactor,
            must_shrink,
            self._begin(session_id, receipt, expect),
        )
        compaction.begun.on_done(lambda begun: self._launch(compaction, begun))
        return compaction

    async def plan(
        self,
        session_id: str,
        expect: Expect,
        *,
        summarise: Summariser,
        settings: pipeline.Settings,
        force: bool,
        redactor: Redactor | None,
    ) -> CompactResult:
        """What a compaction would do with the history as it is; nothing is done, nobody asked.

        Raises:
            NothingToCompact: it would end so.
            CompactionFailed: no request could be made of it.
        """
        session = await self._store.session(session_id)
        if session.state == "archived":
            raise SessionClosed
        expect.check(session.revision, session.generation)
        parts = await pipeline.divide(await self._entries(session, 0), settings)
        if parts.nothing_to_summarise and not force:
            raise NothingToCompact
        redact = redactor.text if redactor else str
        room = await pipeline.measure(parts, settings)
        source = pipeline.source_of(parts, room, settings, redact)
        request = await summarise.first_request(source)

        async def part(entries: Sequence[Entry]) -> PlannedPart:
            tokens = await count_tokens_of([entry.item for entry in entries])
            return PlannedPart(
                [entry.entry_id for entry in entries],
                messages.Tokens(tokens.count, tokens.method, tokens.exact),
            )

        return CompactResult(
            None,
            "planned",
            wire_session(session),
            CompactionPlan(
                await part(parts.instructions),
                await part(parts.reminders),
                await part(parts.tail),
                await part(parts.body),
                await part(parts.dropped),
                settings.context_limit,
                PlannedRequest(request.provider, msgspec.Raw(request.body)) if request else None,
            ),
            entries_before=session.entries,
            tokens_before=wire_tokens(session.tokens),
            redactions=dict(redactor.counts) if redactor else {},
        )

    def skip(
        self, session_id: str, receipt: Receipt, expect: Expect, failure: RpcError
    ) -> "Pending[Session | Replayed]":
        """Record that a compaction was due and is not made: it begins, and has ended at once."""
        begun = self._begin(session_id, receipt, expect)

        def end(begun: "Pending[Session | Replayed]") -> None:
            try:
                begun.result()
            except OutcomeUnknown:  # should it have begun, it is to end as well
                pass
            except StoreError:
                return
            self._end(session_id, _unsettled(receipt.operation_id, failure))

        begun.on_done(end)
        return begun

    def find(self, operation_id: str) -> Compaction | None:
        """The compaction of that id, while it runs in this process."""
        return self._running.get(operation_id)

    async def end_all_of(self, session_id: str, error: RpcError) -> None:
        """Cancel what runs for a session, until it has ended with `error` and left no file: the
        session was deleted, or another is about to replace its history.

        Only within the session's exclusive turn, where none can be committing or begin.
        """
        for compaction in list(self._running.values()):
            if compaction.session_id == session_id:
                compaction.cancelled = error
                compaction.scope.cancel()
                await compaction.ended.settled()

    def cancel_all(self) -> None:
        """Cancel those that have not reached their commit."""
        for compaction in self._running.values():
            compaction.scope.cancel()

    def settle(self, session_id: str) -> "Pending[Operation] | None":
        """Tell the store once more how an operation ended, if there is one that it could not be
        told of.
        """
        unsettled = self._unsettled.pop(session_id, None)
        return self._end(session_id, unsettled) if unsettled else None

    def _begin(
        self, session_id: str, receipt: Receipt, expect: Expect
    ) -> "Pending[Session | Replayed]":
        self.settle(session_id)
        return self._actors.begin(session_id, receipt, expect)

    def _launch(self, compaction: Compaction, begun: "Pending[Session | Replayed]") -> None:
        try:
            session = begun.result()
        except OutcomeUnknown as error:  # should it have begun, it has ended as well
            if compaction.operation_id not in self._running:  # or this repeats one that has
                unsettled = _unsettled(compaction.operation_id, rpc_error(error))
                self._end(compaction.session_id, unsettled)
            return
        except StoreError:
            return
        if not isinstance(session, Replayed):
            self._running[compaction.operation_id] = compaction
            self._tasks.start_soon(self._run, compaction, session)

    async def _run(self, compaction: Compaction, session: Session) -> None:
        try:
            with compaction.scope:
                result = await self._compact(compaction, session)
                self._ended(compaction)
                compaction.ended.resolve(result)
                return
            failure = compaction.cancelled
        except Exception as error:
            failure = rpc_error(error)
        unsettled = _unsettled(compaction.operation_id, failure)
        # Also when the process stops: one `finished` for each `started`.
        with anyio.CancelScope(shield=True), anyio.move_on_after(_END_TIMEOUT_S):
            end = self._end(compaction.session_id, unsettled)
            await end.settled()
            recorded = _recorded(end)
            if isinstance(recorded, bytes):  # nobody could say so at its commit
                self._ended(compaction)
                compaction.ended.resolve(recorded)
                return
            failure = recorded or failure
        self._ended(compaction)
        compaction.ended.reject(failure)

    def _ended(self, compaction: Compaction) -> None:
        self._running.pop(compaction.operation_id)
        self.ended.send()

    def _end(self, session_id: str, unsettled: Unsettled) -> "Pending[Operation]":
        """Tell the store how an operation ended; what it cannot take is told again by `settle`."""

        def done(ended: "Pending[Operation]") -> None:
            try:
                ended.result()
            except StorageError:
                self._unsettled[session_id] = unsettled
            except StoreError:
                pass  # the session is gone, and the operation ended with it

        pending = self._store.end(
            unsettled.operation_id, unsettled.status, unsettled.outcome, unsettled.members
        )
        pending.on_done(done)
        return pending

    async def _compact(self, compaction: Compaction, session: Session) -> bytes:
        last_told_s = 0.0

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal last_told_s
            now_s = anyio.current_time()
            if now_s - last_told_s >= _PROGRESS_INTERVAL_S:
                last_told_s = now_s
                self._subscriptions.progress(
                    compaction.session_id, compaction.operation_id, stage, done, total
                )

        # Written while the summary is made; it is of use unless something is appended meanwhile.
        early: Pending[Revision] = Pending()
        self._tasks.start_soon(self._archive, session, compaction.operation_id, early)
        result = b""
        try:
            history = await self._entries(session, 0)
            parts = await pipeline.divide(history, compaction.settings, progress)
            if parts.nothing_to_summarise and not compaction.force:
                raise NothingToCompact
            plan = await pipeline.prepare(
                parts,
                summarise=compaction.summarise,
                settings=compaction.settings,
                archived_revision=session.revision,
                progress=progress,
                redact=compaction.redactor.text if compaction.redactor else str,
            )
            compaction.tokens_after = plan.tokens_after.count
            # What is appended meanwhile adds the same to both.
            if (
                compaction.must_shrink
                and compaction.tokens_after >= wire_tokens(session.tokens).count
            ):
                raise NoGain
            async with self._actors.exclusive(compaction.session_id):
                # From here on it is decided whether it happens, and a cancel comes too late.
                with anyio.CancelScope(shield=True):
                    result = await self._commit(compaction, session, plan, early)
        except OutcomeUnknown:
            raise  # the row may be there, so the file must stay
        except BaseException:
            with anyio.CancelScope(shield=True):
                await early.settled()
                await self._store.discard_archive(compaction.session_id, session.revision)
            raise
        return result

    async def _archive(
        self, session: Session, operation_id: str, outcome: "Pending[Revision]"
    ) -> None:
        try:
            with anyio.CancelScope(shield=True):  # a thread writes, and goes on anyway
                archive = await self._store.archive(session, "compaction", operation_id)
                outcome.resolve(archive)
        except Exception as error:  # it is the commit that fails by it, and tells
            outcome.reject(error)

    async def _commit(
        self,
        compaction: Compaction,
        begun: Session,
        plan: pipeline.Plan,
        early: "Pending[Revision]",
    ) -> bytes:
        store = self._store
        present = await store.session(compaction.session_id)
        if present.generation != begun.generation or present.running != compaction.operation_id:
            raise Superseded
        carried: list[Entry] = []
        await early.settled()
        if present.revision == begun.revision:
            archive = early.result()
        else:
            await store.discard_archive(compaction.session_id, begun.revision)
            carried = await self._entries(present, begun.entries)
            archive = await store.archive(present, "compaction", compaction.operation_id)
        entry_id = present.next_entry_id
        history = plan.build(
            entry_id,
            self._now_ms(),
            Reminder(present.generation + 1, compaction.operation_id, present.revision),
            carried,
        )
        kept = [entry.entry_id for entry in history if entry.entry_id != entry_id]
        tokens_after = Tokens(
            plan.tokens_after.count if plan.tokens_after.exact else 0,
            (0 if plan.tokens_after.exact else plan.tokens_after.count)
            + present.tokens.estimated
            - begun.tokens.estimated,
        )
        change = Replacement(
            compaction.operation_id,
            archive,
            History(
                [encode_entry(entry) for entry in history],
                [call for entry in history for call in item_facts(entry.item).calls],
                entry_id + 1,
                tokens_after,
            ),
            {
                "tokens_before": wire_tokens(present.tokens),
                "tokens_after": wire_tokens(tokens_after),
                "retained_entry_ids": kept,
                "reminder_entry_id": entry_id,
                "carried_over": len(carried),
            },
            {"quality": plan.quality},
        )
        outcome = b""

        def render(session: Session) -> bytes:
            nonlocal outcome
            outcome = _encode(
                _result(compaction, plan, session, present, archive, entry_id, len(carried))
            )
            return outcome

        await put_in_place(store, compaction.session_id, change, render=render)
        logger.info(
            "compacted: %d entries to %d, generation %d",
            present.entries,
            len(history),
            present.generation + 1,
        )
        return outcome

    async def _entries(self, session: Session, start: int) -> list[Entry]:
        """The entries from index `start` on, of the history as `session` knows it."""
        pages = read_pages(
            self._store,
            session.session_id,
            generation=session.generation,
            entries=session.entries,
            start=start,
        )
        return [decode_entry(line) async for lines in pages for line in lines]


def _unsettled(operation_id: str, failure: RpcError) -> Unsettled:
    if isinstance(failure, OutcomeUnknownError):
        failure = StorageFailed()  # where it can be recorded that it failed, it was not made
    status: Status = "failed"
    if isinstance(failure, Cancelled):
        status = "cancelled"
    elif isinstance(failure, NothingToCompact | NoGain | BreakerOpen):
        status = "skipped"
    return Unsettled(operation_id, status, _encode(failure.to_wire()), {"reason": failure.reason})


def _recorded(end: "Pending[Operation]") -> bytes | RpcError | None:
    """The result or the error that the operation is known to have ended with, which may be
    another's doing; None where that is not known.
    """
    try:
        operation = end.result()
    except StoreError:
        return None
    outcome = operation.outcome or b"{}"
    return outcome if operation.status == "completed" else from_wire(msgspec.json.decode(outcome))


def _result(
    compaction: Compaction,
    plan: pipeline.Plan,
    session: Session,
    before: Session,
    archive: Revision,
    reminder_entry_id: int,
    carried_over: int,
) -> CompactResult:
    return CompactResult(
        compaction.operation_id,
        "completed",
        wire_session(session),
        archived_revision=archive.revision,
        archive=ArchiveInfo(archive.sha256, archive.bytes, archive.entries),
        entries_before=before.entries,
        entries_after=session.entries,
        tokens_before=wire_tokens(before.tokens),
        tokens_after=wire_tokens(session.tokens),
        carried_over=carried_over,
        reminder_entry_id=reminder_entry_id,
        quality=plan.quality,
        attempts=len(plan.attempts),
        attempt_log=list(plan.attempts),
        redactions=dict(compaction.redactor.counts) if compaction.redactor else {},
    )
