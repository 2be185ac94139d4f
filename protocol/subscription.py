"""A subscription that outlives its connection: every event once, in order (PROTOCOL.md §4).

All its work is done by the task that iterates. What the connection's reader hands over is queued
between marks:

- *lost*: the connection ended; subscribe anew, then go on. For one session the server goes on
  behind the last `seq`. For all sessions, for which there is no such number, gaps are put in front
  of what comes.
- *gap*: events of a session were missed; they are fetched with `session.events` and stand where the
  mark stands.
- *gone*: that session is not there any more; the iteration ends with an error.
- *refused*: the token is no longer good; the iteration ends with an error, and so will others.
- *unseen*: sessions of which no event came before the connection was lost may have had their first;
  they are found by `updated_at`, and become gaps.

Whatever comes twice that way is known by its `seq`.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

import anyio
import msgspec

from recapd.protocol.errors import NotFound, Unauthenticated
from recapd.protocol.link import BadAnswer, Link, NoticeHead, OnAnswer
from recapd.protocol.messages import (
    EventName,
    EventsParams,
    EventsResult,
    ListFilter,
    ListParams,
    ListResult,
    Params,
    PingResult,
    SubscribeParams,
    SubscribeResult,
)

Since = int | Literal["now", "start"]

RESET: Final = "subscription.reset"
"""Method of a notice that the client makes: events of a session may be missing; read it anew."""

_QUEUED_MAX: Final = 1000
# Notices that wait for the iterating task. What comes beyond is fetched from the log later; the
# reader never waits, for the iterating task may itself be waiting for an answer behind the events.

_LIST_LIMIT: Final = 1000

_COMMIT_TIME: Final = timedelta(seconds=1)
# An event bears the time at which its change began, so it may be that much older than the
# subscription and yet have been committed after it.

Call = Callable[[str, Params, OnAnswer | None], Awaitable[msgspec.Raw]]


class Notice(msgspec.Struct, frozen=True):
    """What a subscription was told: the method of a notification, and its parameters as sent.

    `session_id` and `seq` are None where it has none: `server.draining` has neither,
    `compaction.progress` no seq.
    """

    method: str
    session_id: str | None
    seq: int | None
    params: msgspec.Raw


class _Lost:
    """The connection ended."""


@dataclass(slots=True, eq=False)
class _Gap:
    """Events of a session were missed: those after `since`, or after the last one passed on."""

    session_id: str
    since: int | None = None
    from_at: str = ""  # earlier ones are not meant


class _Gone:
    """The session is not there any more."""


class _Refused:
    """The token is no longer good."""


class _Unseen:
    """Sessions without any event so far may have had one."""


_Item = Notice | _Lost | _Gap | _Gone | _Refused | _Unseen


class _LoggedHead(msgspec.Struct, frozen=True):
    method: str
    seq: int
    at: str


_decode_subscribed = msgspec.json.Decoder(SubscribeResult).decode
_decode_events = msgspec.json.Decoder(EventsResult).decode
_decode_list = msgspec.json.Decoder(ListResult).decode
_decode_ping = msgspec.json.Decoder(PingResult).decode
_encode = msgspec.json.Encoder().encode
_decode_logged = msgspec.json.Decoder(_LoggedHead).decode


class Subscription:
    """Iterate over it with `async for`; one task at a time. Made by `Client.subscribe`.

    Cancelling a wait for the next notice loses none.
    """

    def __init__(
        self,
        call: Call,
        session_id: str | None,
        since: Since,
        events: Sequence[EventName] | None,
    ) -> None:
        self._call = call
        self._session_id = session_id
        self._since: Since = since
        self._events = None if events is None else frozenset(events)
        self._seen: dict[str, int] = {}  # by session, the seq of the last event passed on
        self._begun_at = ""  # the server's time
        self._queue: deque[_Item] = deque()
        self._fetched: deque[Notice] = deque()
        self._overflowed: set[str] = set()  # sessions with a gap at the end of their queue
        self._wake = anyio.Event()
        self._link: Link | None = None
        self._subscription_id = ""
        self._ended = False

    def __aiter__(self) -> "Subscription":
        return self

    async def __anext__(self) -> Notice:
        """The next notice.

        Raises NotConnected or ConnectionLost when the daemon could not be reached again in time,
        and RpcError where it refuses (NotFound when the session has gone meanwhile); a further call
        tries again.
        """
        while True:
            # An item leaves the queue when its work is done: a cancel before leaves it there.
            if self._fetched:
                notice = self._fetched.popleft()
                if self._is_new(notice):
                    return notice
            elif not self._queue:
                self._wake = anyio.Event()
                await self._wake.wait()
            else:
                match self._queue[0]:
                    case Notice() as notice:
                        self._queue.popleft()
                        if self._is_new(notice):
                            return notice
                    case _Gap() as gap:
                        await self._fetch(gap)
                    case _Unseen():
                        await self._find_unseen()
                    case _Lost():
                        await self._begin_anew()
                    case _Gone():
                        self._queue[0] = _Lost()
                        raise NotFound
                    case _Refused():
                        self._queue[0] = _Lost()
                        raise Unauthenticated

    def _is_new(self, notice: Notice) -> bool:
        if notice.seq is None or notice.session_id is None:
            return True
        if notice.seq <= self._seen.get(notice.session_id, -1):
            return False
        self._seen[notice.session_id] = notice.seq
        return True

    async def begin(self) -> None:
        """Subscribe, for the first time or anew."""
        since: Since = self._since
        if self._session_id is not None:
            if self._session_id in self._seen:
                since = self._seen[self._session_id]
        elif since == "now" and not self._begun_at:
            self._begun_at = _decode_ping(await self._call("protocol.ping", Params(), None)).now
        params = SubscribeParams(
            session_id=self._session_id,
            since=since,
            events=None if self._events is None else sorted(self._events),
        )
        await self._call("session.subscribe", params, self._subscribed)

    async def _begin_anew(self) -> None:
        try:
            await self.begin()
        except NotFound:
            # The session was deleted meanwhile; the log still has the event that says so.
            assert self._session_id is not None
            self._queue[0] = _Gone()
            self._queue.appendleft(_Gap(self._session_id))

    def end(self) -> None:
        """Unsubscribe; nothing more is told."""
        self._ended = True
        if self._link is not None:
            self._leave(self._link)

    def _leave(self, link: Link) -> None:
        if link.sinks.pop(self._subscription_id, None) is not None:
            link.notify("session.unsubscribe", {"subscription_id": self._subscription_id})

    # Called by the reader of the connection.

    def _subscribed(self, link: Link, result: msgspec.Raw) -> None:
        answer = _decode_subscribed(result)
        if self._ended:  # the caller was cancelled, and the answer came late
            link.notify("session.unsubscribe", {"subscription_id": answer.subscription_id})
            return
        again = self._link is not None
        if self._link is not None:
            self._leave(
                self._link
            )  # of a caller that was cancelled between the answer and its return
        if self._queue and isinstance(self._queue[0], _Lost):
            self._queue.popleft()
        self._link = link
        self._subscription_id = answer.subscription_id
        link.sinks[answer.subscription_id] = self
        if self._session_id is not None:
            self._seen[self._session_id] = answer.from_seq
            if answer.resume == "reset":
                self._put(_reset(self._session_id))
        elif again and self._since == "now":
            for session_id in self._seen:
                self._put(_Gap(session_id))
            self._put(_Unseen())

    def told(self, method: str, head: NoticeHead, params: msgspec.Raw) -> None:
        if method == "subscription.ended":
            self._put(_Refused())
            return
        full = len(self._queue) >= _QUEUED_MAX
        notice = Notice(method, head.session_id, head.seq, params)
        if head.seq is None or head.session_id is None:
            if not full or head.session_id is None:
                self._put(notice)
        elif head.session_id not in self._overflowed:
            if full:
                self._overflowed.add(head.session_id)
                self._put(_Gap(head.session_id, head.prev_seq))
            else:
                self._put(notice)

    def lost(self) -> None:
        self._put(_Lost())

    def _put(self, item: _Item) -> None:
        self._queue.append(item)
        self._wake.set()

    # Called by the task that iterates.

    async def _fetch(self, gap: _Gap) -> None:
        """Fetch one page of what was missed; the gap ends with an empty one."""
        self._overflowed.discard(
            gap.session_id
        )  # from here on they are queued again, behind the gap
        since = max(gap.since or 0, self._seen.get(gap.session_id, 0))
        try:
            raw = await self._call(
                "session.events", EventsParams(session_id=gap.session_id, since=since), None
            )
        except NotFound:  # it has gone, and with it its log
            self._queue.popleft()
            return
        answer = _decode_events(raw)
        if answer.resume == "reset":
            self._seen[gap.session_id] = answer.next_seq
            self._fetched.append(_reset(gap.session_id))
        elif answer.next_seq < since:
            raise BadAnswer
        gap.since = answer.next_seq
        for event in answer.events:
            head = _decode_logged(event)
            if head.at >= gap.from_at and (self._events is None or head.method in self._events):
                told = bytes(event).removeprefix(b'{"method":%b,' % _encode(head.method))
                params = b'{"subscription_id":%b,%b' % (
                    _encode(self._subscription_id),
                    told.removeprefix(b"{"),
                )
                self._fetched.append(
                    Notice(head.method, gap.session_id, head.seq, msgspec.Raw(params))
                )
        if not answer.events:
            self._queue.popleft()

    async def _find_unseen(self) -> None:
        after = datetime.fromisoformat(self._begun_at) - _COMMIT_TIME
        from_at = after.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        found: list[str] = []
        cursor: str | None = None
        while True:
            params = ListParams(
                filter=ListFilter(updated_after=after),
                sort="session_id",  # a session that is updated meanwhile keeps its place
                order="asc",
                limit=_LIST_LIMIT,
                cursor=cursor,
            )
            page = _decode_list(await self._call("session.list", params, None))
            found += (one.session_id for one in page.sessions)
            cursor = page.next_cursor
            if cursor is None:
                break
        self._queue.popleft()
        for session_id in reversed(found):
            if session_id not in self._seen:
                self._queue.appendleft(_Gap(session_id, 0, from_at))


def _reset(session_id: str) -> Notice:
    params = msgspec.json.encode({"session_id": session_id})
    return Notice(RESET, session_id, None, msgspec.Raw(params))
