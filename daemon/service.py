"""What the parts of a running daemon share."""

import os
import resource
import secrets
from collections.abc import Callable
from typing import Final, Literal

import anyio
from anyio.abc import TaskGroup

from recapd.daemon.actor import Actors
from recapd.daemon.authority import Authority
from recapd.daemon.automatic import Automatic
from recapd.daemon.compactions import Compactions
from recapd.daemon.config import Settings
from recapd.daemon.connection import Connection, Flusher
from recapd.daemon.dispatch import Dispatcher, Handler
from recapd.daemon.handlers import (
    events,
    history,
    operations,
    past,
    server,
    sessions,
    tokens,
    verify,
)
from recapd.daemon.past import Past
from recapd.daemon.signal import Signal
from recapd.daemon.stalls import StallWatch
from recapd.daemon.subscriptions import Subscriptions
from recapd.protocol.messages import Limits
from recapd.storage.store import Store

_DESCRIPTORS_KEPT: Final = 64
# The store, its readers, archives and requests to models; about 20 are open at rest.

_HANDLERS: Final[dict[str, Handler]] = {
    "protocol.initialize": server.initialize,
    "protocol.ping": server.ping,
    "rpc.discover": server.discover,
    "server.info": server.info,
    "server.health": server.health,
    "server.shutdown": server.shutdown,
    "session.create": sessions.create,
    "session.list": sessions.list_sessions,
    "session.get": history.get,
    "session.revisions": history.revisions,
    "session.verify": verify.verify,
    "session.append": sessions.append,
    "session.compact": history.compact,
    "session.restore": past.restore,
    "session.rewind": past.rewind,
    "session.fork": past.fork,
    "session.export": history.export,
    "session.update": sessions.update,
    "session.delete": sessions.delete,
    "session.subscribe": events.subscribe,
    "session.unsubscribe": events.unsubscribe,
    "session.events": events.events,
    "operation.get": operations.get,
    "operation.cancel": operations.cancel,
    "token.create": tokens.create,
    "token.list": tokens.list_tokens,
    "token.revoke": tokens.revoke,
}


def _random_id() -> str:
    return secrets.token_hex(16)


class Stopping:
    """How and when the daemon is to stop."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.timeout_s: float | None = None  # None: as the settings say
        self.hurried = False
        self.scope = anyio.CancelScope()  # of what is still allowed to end

    def ask(self, mode: Literal["drain", "now"], deadline_ms: int | None = None) -> None:
        """Begin to stop; what is under way has until the deadline to end, or no time (`now`)."""
        if mode == "now":
            self.hurried = True
            self.scope.cancel()
        elif deadline_ms is not None:
            self.timeout_s = deadline_ms / 1000
        self.asked.set()


class Service:
    """One daemon. `tasks` holds what outlives a connection."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        tasks: TaskGroup,
        stopping: Stopping,
        *,
        now_ms: Callable[[], int],
        elapsed_ms: Callable[[], int],
        new_id: Callable[[], str] = _random_id,
    ) -> None:
        self.store = store
        self.settings = settings
        self.now_ms = now_ms
        self.new_id = new_id
        self.instance_id = new_id()
        self.started_at_ms = now_ms()
        self.flusher = Flusher()
        tasks.start_soon(self.flusher.run)
        self.connections: set[Connection] = set()
        self.authority = Authority(
            store, os.geteuid(), now_ms=now_ms, new_id=new_id, on_revoked=self._shut_out
        )
        self.actors = Actors(store)
        self.subscriptions = Subscriptions(store)
        self.compactions = Compactions(store, self.actors, self.subscriptions, tasks, now_ms)
        self.past = Past(store, self.actors, self.compactions)
        self.automatic = Automatic(
            self.compactions, settings, now_ms=now_ms, elapsed_ms=elapsed_ms, new_id=new_id
        )
        self.stalls = StallWatch(self._busy)
        self.dispatcher = Dispatcher(_HANDLERS)
        self.stopping = stopping
        self.draining = False
        self.connection_ended = Signal()
        self.limits = Limits(
            settings.frame_bytes_max,
            settings.batch_max,
            settings.in_flight_max,
            settings.depth_max,
            connections_max(settings.connections_max),
            settings.subscriptions_max,
            settings.items_per_append_max,
            settings.item_bytes_max,
        )

    def _busy(self) -> bool:
        return len(self.compactions) > 0 or any(one.at_work for one in self.connections)

    def _shut_out(self) -> None:
        for connection in self.connections:
            if connection.principal.revoked:
                connection.shut_out()


def connections_max(wanted: int) -> int:
    """How many connections there is room for: what else is opened needs descriptors, too.

    A limit that low lets one in all the same, so that somebody can say `server.shutdown`.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - _DESCRIPTORS_KEPT))
