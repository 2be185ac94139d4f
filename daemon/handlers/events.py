"""`session.subscribe`, `.unsubscribe`, `.events`."""

from functools import partial
from typing import Literal

import anyio
import msgspec

from recapd.daemon.connection import Call
from recapd.protocol import messages as m
from recapd.protocol.errors import InvalidParams, Overloaded
from recapd.storage.errors import UnknownSession
from recapd.storage.store import Event, Store

_RETRY_AFTER_MS = 1000
_PAGE_BYTES = 1 << 19  # of events in one answer, whatever `limit` says

_encode = msgspec.json.Encoder().encode


async def subscribe(call: Call, params: m.SubscribeParams) -> m.SubscribeResult:
    service = call.service
    connection = call.connection
    if len(connection.subscriptions) >= service.settings.subscriptions_max:
        raise Overloaded(retry_after_ms=_RETRY_AFTER_MS)
    resume: Literal["exact", "reset"] = "exact"
    if params.session_id is None:
        if isinstance(params.since, int):
            raise InvalidParams.at("$.since", '"now" or "start", for seq is per session')
        position = 0 if params.since == "start" else await service.store.last_ordinal()
        from_seq = 0
    else:
        seq = (await service.store.session(params.session_id)).seq
        if params.since == "now":
            position = seq
        elif params.since == "start":
            position = 0
        else:
            position = min(params.since, seq)
            resume = "exact" if params.since <= seq else "reset"
        from_seq = position
    subscription = service.subscriptions.add(connection, params.session_id, params.events, position)
    call.then = partial(connection.start, service.subscriptions.catch_up, subscription)
    return m.SubscribeResult(subscription.subscription_id, from_seq, resume)


async def unsubscribe(call: Call, params: m.UnsubscribeParams) -> m.UnsubscribeResult:
    ended = call.service.subscriptions.remove(call.connection, params.subscription_id)
    return m.UnsubscribeResult(ended)


async def _last_seq(store: Store, session_id: str) -> int:
    """Of a session, or of one that was deleted a moment ago and has left its last event."""
    try:
        return (await store.session(session_id)).seq
    except UnknownSession:
        left = await store.events(session_id, after_seq=0, limit=1)
        if not left:
            raise
        return left[-1].seq


async def events(call: Call, params: m.EventsParams) -> m.EventsResult:
    service = call.service

    async def read() -> list[Event]:
        return await service.store.events(
            params.session_id, after_seq=params.since, limit=params.limit
        )

    with service.subscriptions.next_event(params.session_id) as happened:
        found = await read()
        if not found:
            seq = await _last_seq(service.store, params.session_id)
            if params.since > seq:
                return m.EventsResult([], seq, "reset")
            if params.wait_ms and params.since == seq:
                call.release()  # a long wait holds up nothing that the client sends next
                with anyio.move_on_after(params.wait_ms / 1000):
                    await happened.wait()
            found = await read()
    page: list[msgspec.Raw] = []
    seq, room_bytes = params.since, _PAGE_BYTES
    for one in found:
        event = b'{"method":%b,%b' % (_encode(one.method), one.body[1:])
        room_bytes -= len(event) + 1
        if room_bytes < 0 and page:
            break
        page.append(msgspec.Raw(event))
        seq = one.seq
    return m.EventsResult(page, seq, "exact")
