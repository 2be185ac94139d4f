"""Who is told what: durable events to the subscriptions that want them.

A subscription that keeps up is *live*: it gets each event as it is committed. One that just began
or that fell behind is served from the event log until it has caught up. Either way it gets every
event once, in order, and never holds up another.
"""

import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio
import msgspec

from recapd.protocol.codec import encode_notification
from recapd.protocol.messages import CompactionProgress, ServerDraining, SubscriptionEnded
from recapd.storage.errors import StorageError
from recapd.storage.store import Event, Store

if TYPE_CHECKING:
    from recapd.daemon.connection import Connection

_LOG_PAGE: Final = 500  # events read from the log at once

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class Subscription:
    """`position` is that of the last event passed on: its `seq`, or its ordinal where all sessions
    are meant.
    """

    subscription_id: str
    connection: "Connection"
    session_id: str | None
    methods: frozenset[str] | None  # None: all
    position: int
    live: bool = False
    behind: bool = False  # while not live: something was committed since the log was last looked at

    def wants(self, method: str) -> bool:
        return self.methods is None or method in self.methods

    def pass_on(self, event: Event) -> None:
        """Send one event, unless it was: a reader of the log may see it before it is published."""
        position = event.ordinal if self.session_id is None else event.seq
        if position <= self.position:
            return
        self.position = position
        principal = self.connection.principal
        if self.wants(event.method) and principal.active and principal.sees(event.session_id):
            head = b'{"subscription_id":"%b",' % self.subscription_id.encode()
            self.connection.send(encode_notification(event.method, head + event.body[1:]))


class Subscriptions:
    """All subscriptions of all connections; the store's listener."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_id: dict[str, Subscription] = {}
        self._by_session: dict[str | None, dict[str, Subscription]] = {}
        self._waiters: dict[str, set[anyio.Event]] = {}
        store.listen(self._publish)

    def add(
        self,
        connection: "Connection",
        session_id: str | None,
        methods: Sequence[str] | None,
        position: int,
    ) -> Subscription:
        """Register one; `catch_up` must follow, once the answer that names it was queued."""
        subscription = Subscription(
            secrets.token_hex(8),
            connection,
            session_id,
            None if methods is None else frozenset(methods),
            position,
        )
        self._by_id[subscription.subscription_id] = subscription
        self._by_session.setdefault(session_id, {})[subscription.subscription_id] = subscription
        connection.subscriptions.add(subscription.subscription_id)
        return subscription

    def remove(self, connection: "Connection", subscription_id: str) -> bool:
        """End a subscription of this connection; False when it has none of that id."""
        if subscription_id not in connection.subscriptions:
            return False
        connection.subscriptions.remove(subscription_id)
        subscription = self._by_id.pop(subscription_id)
        others = self._by_session[subscription.session_id]
        del others[subscription_id]
        if not others:
            del self._by_session[subscription.session_id]
        return True

    def drop(self, connection: "Connection") -> None:
        """End all subscriptions of a connection that has ended."""
        for subscription_id in list(connection.subscriptions):
            self.remove(connection, subscription_id)

    def end_all_of(self, connection: "Connection") -> None:
        """End all subscriptions of a connection that is no longer entitled to them, and say so."""
        for subscription_id in list(connection.subscriptions):
            self.remove(connection, subscription_id)
            notice = SubscriptionEnded(subscription_id, "unauthenticated")
            connection.send(encode_notification("subscription.ended", _encode(notice)))

    async def catch_up(self, subscription: Subscription) -> None:
        """Serve a subscription from the log until it is live, or ended."""
        while subscription.subscription_id in self._by_id:
            await subscription.connection.wait_until_it_keeps_up()
            subscription.behind = False
            try:
                if subscription.session_id is None:
                    events = await self._store.events_of_all(
                        after_ordinal=subscription.position, limit=_LOG_PAGE
                    )
                else:
                    events = await self._store.events(
                        subscription.session_id, after_seq=subscription.position, limit=_LOG_PAGE
                    )
            except StorageError:
                subscription.connection.end()  # it resumes by `seq` when it is back
                return
            for event in events:
                subscription.pass_on(event)
            if not events and not subscription.behind:
                subscription.live = True
                return

    def _publish(self, events: Sequence[Event]) -> None:
        for event in events:
            for waiter in self._waiters.get(event.session_id, ()):
                waiter.set()
            for key in (event.session_id, None):
                for subscription in self._by_session.get(key, {}).values():
                    self._offer(subscription, event)

    def _offer(self, subscription: Subscription, event: Event) -> None:
        if not subscription.live:
            subscription.behind = True
        elif subscription.connection.keeps_up:
            subscription.pass_on(event)
        else:
            subscription.live = False
            subscription.connection.start(self.catch_up, subscription)

    @contextmanager
    def next_event(self, session_id: str) -> Generator[anyio.Event]:
        """Set at the next event of the session, while the block runs."""
        waiter = anyio.Event()
        waiters = self._waiters.setdefault(session_id, set())
        waiters.add(waiter)
        try:
            yield waiter
        finally:
            waiters.remove(waiter)
            if not waiters and self._waiters.get(session_id) is waiters:
                del self._waiters[session_id]

    # What is not in the log.

    def progress(
        self, session_id: str, operation_id: str, stage: str, done: int, total: int
    ) -> None:
        """Tell those that keep up how far a compaction is."""
        self._tell(
            "compaction.progress",
            session_id,
            lambda one: CompactionProgress(
                one.subscription_id, session_id, operation_id, stage, done, total
            ),
        )

    def draining(self, deadline: str) -> None:
        """Tell every subscription that the server stops, and let those go who wait for an event."""
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.set()
        for subscription in self._by_id.values():
            notice = ServerDraining(subscription.subscription_id, deadline)
            subscription.connection.send(encode_notification("server.draining", _encode(notice)))

    def _tell(
        self, method: str, session_id: str, notice: Callable[[Subscription], msgspec.Struct]
    ) -> None:
        for key in (session_id, None):
            for subscription in self._by_session.get(key, {}).values():
                connection = subscription.connection
                if (
                    subscription.live
                    and subscription.wants(method)
                    and connection.principal.active
                    and connection.principal.sees(session_id)
                    and connection.keeps_up
                ):
                    connection.send(encode_notification(method, _encode(notice(subscription))))
