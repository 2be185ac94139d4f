"""`session.get`, `.revisions`, `.export`, `.compact`: histories, present and archived, by the same
code.
"""

import anyio
import anyio.to_thread
import msgspec

from recapd.daemon import cursors
from recapd.daemon.compaction.summarise.base import Summariser
from recapd.daemon.compaction.summarise.given import given_summary
from recapd.daemon.config import Settings
from recapd.daemon.connection import Call
from recapd.daemon.cursors import GetPosition
from recapd.daemon.export import export_chunk
from recapd.daemon.handlers.sessions import expect_of, receipt_for, replay
from recapd.daemon.projection import Projection
from recapd.daemon.summarizers import pipeline_settings, source_redactor, summariser_for
from recapd.daemon.wire import wire_revision, wire_session
from recapd.protocol import messages as m
from recapd.protocol.errors import CursorInvalid, InvalidParams
from recapd.storage.errors import RevisionUnknown
from recapd.storage.store import Receipt, Replayed

_PAGE_BYTES = 1 << 20  # of a page of entries, where the client names no size
_PLACEHOLDER_GROWTH = 8  # how much longer placeholders can be than what they stand for, at most


async def get(call: Call, params: m.GetParams) -> m.GetResult:
    store = call.service.store
    full = "history.full" in call.principal.scopes
    projection = Projection(full=full, redact=not full)
    if params.view == "info":
        session = await store.session(params.session_id)
        if params.revision not in (None, session.revision, *session.archived_revisions):
            raise RevisionUnknown(params.revision)
        revision = session.revision if params.revision is None else params.revision
        return m.GetResult(wire_session(session), revision, None, _redaction(projection))
    position = cursors.decode(params.cursor, GetPosition)
    if position is not None and (
        (position.session_id, position.order) != (params.session_id, params.order)
        or params.revision not in (None, position.revision)
    ):
        raise CursorInvalid
    room = call.service.settings.item_bytes_max // (1 if full else _PLACEHOLDER_GROWTH)
    bytes_max = min(params.max_bytes or _PAGE_BYTES, room)
    if position is None:
        page = await store.page(
            params.session_id,
            revision=params.revision,
            limit=params.limit,
            bytes_max=bytes_max,
            order=params.order,
        )
        revision = page.revision
    else:
        try:
            page = await store.page(
                params.session_id,
                generation=position.generation,
                start=position.index,
                total=position.total,
                limit=params.limit,
                bytes_max=bytes_max,
                order=params.order,
            )
        except RevisionUnknown as error:
            raise CursorInvalid from error
        if page.session.created_at_ms != position.created_at_ms:
            raise CursorInvalid
        # The history may have grown or been archived since; what is paged through is what it was.
        revision = position.revision
    next_cursor = None
    if page.next_index is not None:
        next_cursor = cursors.encode(
            GetPosition(
                params.session_id,
                page.session.created_at_ms,
                params.order,
                revision,
                page.generation,
                page.total,
                page.next_index,
            )
        )
    lines = page.entries
    if not projection.changes_nothing:
        lines = await anyio.to_thread.run_sync(lambda: [*map(projection.line, page.entries)])
    entries = msgspec.Raw(b"[%b]" % b",".join(lines))
    return m.GetResult(
        wire_session(page.session), revision, next_cursor, _redaction(projection), entries
    )


def _redaction(projection: Projection) -> m.Redaction:
    return m.Redaction("none" if projection.changes_nothing else "policy", dict(projection.counts))


async def revisions(call: Call, params: m.SessionParams) -> m.RevisionsResult:
    found = await call.service.store.revisions(params.session_id)
    return m.RevisionsResult([wire_revision(revision) for revision in found])


async def export(call: Call, params: m.ExportParams) -> m.ExportResult:
    if params.redact == "none":
        call.principal.require("history.full")
    return await export_chunk(
        call.service.store,
        params,
        full="history.full" in call.principal.scopes,
        frame_bytes_max=call.service.settings.frame_bytes_max,
    )


async def compact(call: Call, params: m.CompactParams) -> object:
    service = call.service
    settings = service.settings
    summarise = _summariser(params, settings)
    how = pipeline_settings(
        settings, params.keep_recent_tokens, fold_reminders=params.fold_reminders
    )
    redactor = source_redactor(settings)
    if params.dry_run:
        call.release()
        planned = await service.compactions.plan(
            params.session_id,
            expect_of(params),
            summarise=summarise,
            settings=how,
            force=params.force,
            redactor=redactor,
        )
        return planned if "history.full" in call.principal.scopes else _without_request(planned)
    receipt = receipt_for("session.compact", params, params.operation_id or service.new_id())
    assert isinstance(receipt, Receipt)
    compaction = service.compactions.start(
        params.session_id,
        receipt,
        expect_of(params),
        summarise=summarise,
        settings=how,
        force=params.force,
        redactor=redactor,
    )
    summarizer = params.summarizer or settings.default_summarizer
    service.automatic.heed(compaction, None if params.summary is not None else summarizer)
    with anyio.CancelScope(shield=True):  # it was handed over: its outcome is the answer
        await compaction.begun.settled()
    begun = compaction.begun.result()
    call.release()  # it has its place; what the client sends next need not wait for its end
    if isinstance(begun, Replayed):
        return await _replay(call, begun, params.wait)
    if not params.wait:
        return m.CompactResult(compaction.operation_id, "running", wire_session(begun))
    try:
        await compaction.ended.settled()
    except BaseException:
        # Who waits and leaves does not want it any more, unless it is too late for that. The answer
        # comes when it has ended, so that whoever asks then finds the truth.
        compaction.scope.cancel()
        with anyio.CancelScope(shield=True):
            await compaction.ended.settled()
        if compaction.ended.failed:
            raise
    return msgspec.Raw(compaction.ended.result())


def _without_request(planned: m.CompactResult) -> m.CompactResult:
    """A plan for who may compact a history and not read it: the request has its transcript."""
    if not isinstance(planned.plan, m.CompactionPlan):
        return planned
    plan = msgspec.structs.replace(planned.plan, request=None)
    return msgspec.structs.replace(planned, plan=plan)


def _summariser(params: m.CompactParams, settings: Settings) -> Summariser:
    """Raises InvalidParams, and CompactionFailed for a summarizer that is not configured."""
    if params.summary is not None:
        for name in ("summarizer", "instructions", "relevance"):
            if getattr(params, name):
                raise InvalidParams.at(f"$.{name}", "no summary beside it")
        return given_summary(params.summary)
    kind = params.summarizer or settings.default_summarizer
    if kind == "offline" and params.relevance:
        raise InvalidParams.at("$.relevance", "a summarizer that asks a model beside it")
    relevance = m.Relevance() if params.relevance is True else params.relevance
    return summariser_for(
        kind, settings, params.instructions, relevance.threshold if relevance else None
    )


async def _replay(call: Call, begun: Replayed, wait: bool) -> object:
    operation = begun.operation
    if operation.status == "running":
        if not wait:
            session = await call.service.store.session(operation.session_id)
            return m.CompactResult(operation.operation_id, "running", wire_session(session))
        running = call.service.compactions.find(operation.operation_id)
        if running is not None:
            await running.ended.settled()
        operation = await call.service.store.operation(operation.operation_id)
    return replay(operation)
