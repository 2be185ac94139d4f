"""Going back: a history of the past in place of the present one, or in a session of its own.

A restore or a rewind runs within the session's exclusive turn: check and read (cancellable) → end
what compacts it (not cancellable from here on) → archive, then one transaction, as PROTOCOL.md §5
says. A fork only reads within the turn of its source.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.lowlevel
import msgspec

from recapd.daemon.actor import Actors
from recapd.daemon.compaction.tokens import estimate_tokens
from recapd.daemon.compactions import Compactions
from recapd.daemon.histories import put_in_place, read_pages
from recapd.daemon.wire import wire_session, wire_tokens
from recapd.protocol.errors import NotFound, Superseded
from recapd.protocol.items import item_facts
from recapd.protocol.messages import ReplaceResult
from recapd.storage.entry import decode_entry
from recapd.storage.errors import RevisionUnknown, SessionClosed
from recapd.storage.pending import Pending
from recapd.storage.store import (
    Expect,
    History,
    Kind,
    NewSession,
    Parent,
    Receipt,
    Replacement,
    Replayed,
    Revision,
    Session,
    Store,
    Tokens,
)

logger = logging.getLogger("recapd.past")

_SLICE_ENTRIES: Final = 200  # looked at in about 1 ms, so the event loop goes on between slices
_SLICE_BYTES: Final = 256 << 10  # likewise

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class _Past:
    """A history that was read, or its first entries."""

    ids: list[int]
    lines: list[bytes]
    calls: list[str]
    tokens: Tokens

    def history(self, next_entry_id: int) -> History:
        return History(self.lines, self.calls, next_entry_id, self.tokens)


class Past:
    """What restores, rewinds and forks."""

    def __init__(self, store: Store, actors: Actors, compactions: Compactions) -> None:
        self._store = store
        self._actors = actors
        self._compactions = compactions

    async def restore(
        self, session_id: str, revision: int, receipt: Receipt, expect: Expect
    ) -> bytes | Replayed:
        """Put an archived revision in place of the present history; the result as JSON.

        Its entries come back as they were: ids, times, bytes, provenance. Raises what a replacement
        may meet; RevisionUnknown, ArchiveMissing, ArchiveCorrupt.
        """

        async def choose(present: Session) -> _Past | None:
            if revision == present.revision:
                return None
            return await self._read(session_id, await self._archived(session_id, revision))

        return await self._replace(session_id, "restore", receipt, expect, choose)

    async def rewind(
        self, session_id: str, after_entry_id: int, receipt: Receipt, expect: Expect
    ) -> bytes | Replayed:
        """Drop the entries behind that one, 0 being before the first; the result as JSON.

        Raises what a replacement may meet; NotFound where the history has no such entry.
        """

        async def choose(present: Session) -> _Past | None:
            kept = await self._read(session_id, present, after_entry_id)
            return None if len(kept.lines) == present.entries else kept

        return await self._replace(session_id, "rewind", receipt, expect, choose)

    async def fork(
        self,
        session_id: str,
        revision: int | None,
        after_entry_id: int | None,
        *,
        new_session_id: str,
        title: str | None,
        receipt: Receipt | None,
        expect: Expect,
        render: Callable[[Session], bytes],
    ) -> Pending[Session | Replayed]:
        """Hand over a session with the entries of another, or with its first ones.

        Raises UnknownSession, Conflict, RevisionUnknown, ArchiveMissing, ArchiveCorrupt; NotFound
        where the history has no such entry; and in the end what `Store.create` raises.
        """
        async with self._actors.exclusive(session_id):
            replayed = None if receipt is None else await self._store.replayed(receipt)
            if replayed is not None:
                made: Pending[Session | Replayed] = Pending()
                made.resolve(replayed)
                return made
            source = await self._store.session(session_id)
            expect.check(source.revision, source.generation)
            chosen: Session | Revision = source
            if revision not in (None, source.revision):
                chosen = await self._archived(session_id, revision)
            past = await self._read(session_id, chosen, after_entry_id)
        # The source is let go first: two forks, each of the other's new session, would wait for
        # each other for ever.
        new = NewSession(
            new_session_id,
            source.title if title is None else title,
            source.cwd,
            source.labels,
            source.durability,
            Parent(session_id, chosen.revision),
            source.auto_compact,
        )
        history = past.history(source.next_entry_id)
        return self._actors.create(new, [], receipt, render, history)

    async def _replace(
        self,
        session_id: str,
        kind: Kind,
        receipt: Receipt,
        expect: Expect,
        choose: Callable[[Session], Awaitable[_Past | None]],
    ) -> bytes | Replayed:
        outcome = b""
        async with self._actors.exclusive(session_id):
            replayed = await self._store.replayed(receipt)
            if replayed is not None:
                return replayed
            present = await self._store.session(session_id)
            expect.check(present.revision, present.generation)
            if present.state == "archived":
                raise SessionClosed
            chosen = await choose(present)
            # From here on it is decided whether it happens, and a cancel comes too late.
            with anyio.CancelScope(shield=True):
                outcome = await self._commit(present, kind, receipt, chosen)
        return outcome

    async def _commit(
        self, present: Session, kind: Kind, receipt: Receipt, chosen: _Past | None
    ) -> bytes:
        store, session_id = self._store, present.session_id
        outcome = b""

        def render(session: Session) -> bytes:
            nonlocal outcome
            outcome = _encode(_result(receipt.operation_id, present, session))
            return outcome

        if chosen is None:
            await store.keep(session_id, receipt, render=render).wait()
            return outcome
        # First, for its early archive may have the name of the one that is written now: what it
        # would still write or remove there would be this one.
        await self._compactions.end_all_of(session_id, Superseded())
        archive = await store.archive(present, kind, receipt.operation_id)
        change = Replacement(
            receipt.operation_id,
            archive,
            chosen.history(present.next_entry_id),
            {
                "tokens_before": wire_tokens(present.tokens),
                "tokens_after": wire_tokens(chosen.tokens),
                "retained_entry_ids": chosen.ids,
                "reminder_entry_id": None,
                "carried_over": 0,
            },
        )
        await put_in_place(store, session_id, change, receipt=receipt, render=render)
        logger.info(
            "%s: %d entries to %d, generation %d",
            kind,
            present.entries,
            len(chosen.lines),
            present.generation + 1,
        )
        return outcome

    async def _archived(self, session_id: str, revision: int | None) -> Revision:
        for archived in await self._store.revisions(session_id):
            if archived.revision == revision:
                return archived
        raise RevisionUnknown(revision)

    async def _read(
        self, session_id: str, history: Session | Revision, after_entry_id: int | None = None
    ) -> _Past:
        """The entries of a history to the one of that id; all, if None. Its lines are held once.

        Only within the session's exclusive turn, in which it stays the same session.
        """
        ids: list[int] = []
        lines: list[bytes] = []
        calls: list[str] = []
        estimated = slice_bytes = 0
        found = after_entry_id in (None, 0)
        pages = read_pages(
            self._store,
            session_id,
            generation=history.generation,
            entries=0 if after_entry_id == 0 else history.entries,
        )
        async with aclosing(pages):
            async for page in pages:
                for line in page:
                    entry = decode_entry(line)
                    ids.append(entry.entry_id)
                    lines.append(line)
                    calls += item_facts(entry.item).calls
                    estimated += estimate_tokens(entry.item)
                    if entry.entry_id == after_entry_id:
                        found = True
                        break
                    slice_bytes += len(line)
                    if slice_bytes > _SLICE_BYTES or len(lines) % _SLICE_ENTRIES == 0:
                        slice_bytes = 0
                        await anyio.lowlevel.checkpoint()
                if found and after_entry_id is not None:
                    break
        if not found:
            raise NotFound("entry")
        whole = len(lines) == history.entries
        return _Past(ids, lines, calls, history.tokens if whole else Tokens(0, estimated))


def _result(operation_id: str, before: Session, after: Session) -> ReplaceResult:
    changed = after.generation != before.generation
    return ReplaceResult(
        operation_id,
        wire_session(after),
        before.revision if changed else None,
        before.entries,
        after.entries,
        wire_tokens(before.tokens),
        wire_tokens(after.tokens),
    )
