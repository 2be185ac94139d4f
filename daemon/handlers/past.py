"""`session.restore`, `.rewind`, `.fork`: histories of the past, put in place or taken up anew."""

import msgspec

from recapd.daemon.connection import Call
from recapd.daemon.dispatch import Later
from recapd.daemon.handlers.sessions import (
    answer,
    encode,
    expect_of,
    receipt_for,
    replay,
    session_result,
)
from recapd.protocol import messages as m
from recapd.storage.store import Receipt, Replayed


async def restore(call: Call, params: m.RestoreParams) -> object:
    receipt = _receipt(call, "session.restore", params)
    return _answer(
        await call.service.past.restore(
            params.session_id, params.revision, receipt, expect_of(params)
        )
    )


async def rewind(call: Call, params: m.RewindParams) -> object:
    receipt = _receipt(call, "session.rewind", params)
    return _answer(
        await call.service.past.rewind(
            params.session_id, params.after_entry_id, receipt, expect_of(params)
        )
    )


async def fork(call: Call, params: m.ForkParams) -> Later:
    service = call.service
    pending = await service.past.fork(
        params.session_id,
        params.revision,
        params.after_entry_id,
        new_session_id=params.new_session_id or service.new_id(),
        title=params.title,
        receipt=receipt_for("session.fork", params, params.operation_id),
        expect=expect_of(params),
        render=lambda session: encode(session_result(session)),
    )
    return Later(pending, answer(session_result))


def _receipt(call: Call, method: str, params: m.MutationParams) -> Receipt:
    """Always there: an archive names the operation that made it."""
    receipt = receipt_for(method, params, params.operation_id or call.service.new_id())
    assert receipt is not None
    return receipt


def _answer(outcome: bytes | Replayed) -> object:
    return replay(outcome.operation) if isinstance(outcome, Replayed) else msgspec.Raw(outcome)
