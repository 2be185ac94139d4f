"""`session.create`, `.list`, `.append`, `.update`, `.delete`: changes of sessions, and the list of
them.
"""

import hashlib
from collections.abc import Callable, Sequence
from math import ceil, floor
from typing import TypeVar

import anyio
import msgspec
from msgspec import UNSET

from recapd.daemon import cursors
from recapd.daemon.compaction.tokens import estimate_tokens
from recapd.daemon.connection import Call
from recapd.daemon.dispatch import Later
from recapd.daemon.summarizers import summariser_for
from recapd.daemon.wire import wire_session
from recapd.protocol import messages as m
from recapd.protocol.errors import (
    Cancelled,
    CompactionFailed,
    CursorInvalid,
    Expectation,
    InvalidParams,
    ItemTooLarge,
    from_wire,
)
from recapd.protocol.items import item_facts, one_line
from recapd.storage.store import (
    Appended,
    AutoCompact,
    Expect,
    NewItem,
    NewSession,
    Operation,
    Query,
    Receipt,
    Replayed,
    Session,
    SessionChanges,
)

T = TypeVar("T")

_LABELS_CHARACTERS_MAX = 16_000  # they are part of every answer that has a session

encode = msgspec.json.Encoder(order="deterministic").encode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def receipt_for(method: str, params: m.Params, operation_id: str | None) -> Receipt | None:
    """What makes the request happen at most once, if it names an operation."""
    if operation_id is None:
        return None
    parameters = encode(msgspec.structs.replace(params, meta=None))  # a retry may trace differently
    return Receipt(operation_id, method, hashlib.sha256(parameters).digest())


def replay(operation: Operation) -> object:
    """The answer to a repeated request: the recorded result, marked, or the recorded error."""
    if operation.status != "completed":
        raise from_wire(msgspec.json.decode(operation.outcome or b"{}"))
    members = _decode_object(operation.outcome or b"{}")
    return {**members, "replayed": True}


def answer(convert: Callable[[T], object]) -> Callable[[T | Replayed], object]:
    """Makes the answer of what was done, or repeats the recorded one."""
    return lambda outcome: (
        replay(outcome.operation) if isinstance(outcome, Replayed) else convert(outcome)
    )


def expect_of(params: m.MutationParams) -> Expect:
    """What the caller believes the session to be at."""
    return Expect(params.expected_revision, params.expected_generation)


def _items(call: Call, raw_items: Sequence[msgspec.Raw]) -> list[NewItem]:
    settings = call.service.settings
    if len(raw_items) > settings.items_per_append_max:
        raise InvalidParams.at("$.items", f"at most {settings.items_per_append_max} items")
    items: list[NewItem] = []
    for index, raw in enumerate(raw_items):
        item = one_line(bytes(raw))
        if len(item) > settings.item_bytes_max:
            raise ItemTooLarge(index=index, limit_bytes=settings.item_bytes_max)
        facts = item_facts(item, f"$.items[{index}]")
        items.append(NewItem(item, estimate_tokens(item), facts.calls, facts.outputs))
    return items


def _check_labels(labels: dict[str, str]) -> None:
    if sum(len(name) + len(value) for name, value in labels.items()) > _LABELS_CHARACTERS_MAX:
        raise InvalidParams.at("$.labels", f"at most {_LABELS_CHARACTERS_MAX} characters in all")


def _auto_compact(call: Call, given: m.NewAutoCompact | None) -> AutoCompact | None:
    """Raises InvalidParams for what could never work."""
    call.principal.require("session.compact")
    if given is None:
        return None
    if given.keep_recent_tokens >= given.at_tokens:
        raise InvalidParams.at("$.auto_compact.keep_recent_tokens", "less than at_tokens")
    if given.summarizer is not None:
        try:
            summariser_for(given.summarizer, call.service.settings, given.instructions)
        except CompactionFailed as error:
            place: Expectation = {
                "path": "$.auto_compact.summarizer",
                "expected": "a summarizer that is configured",
            }
            raise InvalidParams(errors=[place], hint=error.hint) from error
    return msgspec.convert(given, AutoCompact, from_attributes=True)


def session_result(session: Session) -> m.SessionResult:
    """The session after the change."""
    return m.SessionResult(wire_session(session))


def _create_result(session: Session) -> m.CreateResult:
    return m.CreateResult(session.session_id, wire_session(session))


def _append_result(appended: Appended) -> m.AppendResult:
    return m.AppendResult(
        wire_session(appended.session),
        list(range(appended.first_entry_id, appended.last_entry_id + 1)),
        [
            m.AppendWarning("output_without_call", entry_id, call_id)
            for entry_id, call_id in appended.unmatched
        ],
    )


def _delete_result(deleted: bool) -> m.DeleteResult:
    return m.DeleteResult(deleted)


async def create(call: Call, params: m.CreateParams) -> Later:
    service = call.service
    _check_labels(params.labels)
    new = NewSession(
        params.session_id or service.new_id(),
        params.title,
        params.cwd,
        params.labels,
        params.durability,
        auto_compact=None
        if params.auto_compact is None
        else _auto_compact(call, params.auto_compact),
    )
    pending = service.actors.create(
        new,
        _items(call, params.items),
        receipt_for("session.create", params, params.operation_id),
        lambda session: encode(_create_result(session)),
    )
    service.automatic.watch(pending)
    return Later(pending, answer(_create_result))


async def append(call: Call, params: m.AppendParams) -> Later:
    pending = call.service.actors.append(
        params.session_id,
        _items(call, params.items),
        expect_of(params),
        receipt_for("session.append", params, params.operation_id),
        lambda appended: encode(_append_result(appended)),
    )
    call.service.automatic.watch(pending)
    return Later(pending, answer(_append_result))


async def update(call: Call, params: m.UpdateParams) -> Later:
    if isinstance(params.labels, dict):
        _check_labels(params.labels)
    changes = SessionChanges(
        params.title,
        params.cwd,
        {} if params.labels is None else params.labels,
        params.state,
        UNSET if params.auto_compact is UNSET else _auto_compact(call, params.auto_compact),
    )
    pending = call.service.actors.update(
        params.session_id,
        changes,
        expect_of(params),
        receipt_for("session.update", params, params.operation_id),
        lambda session: encode(session_result(session)),
    )
    if params.auto_compact is not UNSET:
        call.service.automatic.watch(pending)
    return Later(pending, answer(session_result))


async def delete(call: Call, params: m.DeleteParams) -> object:
    service = call.service
    receipt = receipt_for("session.delete", params, params.operation_id)
    async with service.actors.exclusive(params.session_id):
        pending = service.store.delete(
            params.session_id,
            expect=expect_of(params),
            receipt=receipt,
            render=lambda deleted: encode(_delete_result(deleted)),
            ended=encode(Cancelled().to_wire()),
        )
        with anyio.CancelScope(shield=True):  # it was handed over: its outcome is the answer
            await pending.settled()
            # Before a session of the same id can be made: what still ran for the old one would
            # take the new one's archive for its own.
            if not pending.failed and pending.result() is True:
                await service.compactions.end_all_of(params.session_id, Cancelled())
    return answer(_delete_result)(pending.result())


async def list_sessions(call: Call, params: m.ListParams) -> m.ListResult:
    wanted = params.filter or m.ListFilter()
    position = cursors.decode(params.cursor, cursors.ListPosition)
    if position is not None and (position.sort, position.order) != (params.sort, params.order):
        raise CursorInvalid
    sessions = await call.service.store.sessions(
        Query(
            wanted.state,
            wanted.cwd,
            wanted.labels,
            wanted.title_contains,
            # Both bounds are exclusive, and what they are compared with is whole milliseconds.
            None
            if wanted.updated_after is None
            else floor(1000 * wanted.updated_after.timestamp()),
            None
            if wanted.updated_before is None
            else ceil(1000 * wanted.updated_before.timestamp()),
            params.sort,
            params.order,
            params.limit + 1,
            None if position is None else (position.value, position.session_id),
            call.principal.only,
        )
    )
    page = [wire_session(session) for session in sessions[: params.limit]]
    while len(encode(page)) > call.service.settings.item_bytes_max:
        del page[len(page) // 2 :]
    next_cursor = None
    if len(page) < len(sessions):
        last = sessions[len(page) - 1]
        values: dict[str, int | str] = {
            "updated_at": last.updated_at_ms,
            "created_at": last.created_at_ms,
            "session_id": last.session_id,
        }
        next_cursor = cursors.encode(
            cursors.ListPosition(params.sort, params.order, values[params.sort], last.session_id)
        )
    return m.ListResult(page, next_cursor)
