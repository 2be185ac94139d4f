"""One actor for each session in use: the order in which things happen to it.

An actor has a mailbox and no task of its own. Commands start in the order in which they came.
Appends and other small changes may overlap, since the store makes them in the order in which it was
given them; a command that replaces or removes the history is *exclusive*: it starts when all before
it are durable, and what comes later waits for it. Connections keep the order of their own requests
with the same `Order`.
"""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from typing import Final, TypeVar

import anyio

from recapd.protocol.errors import Overloaded
from recapd.storage.pending import Pending
from recapd.storage.store import (
    NOTHING_EXPECTED,
    Appended,
    Expect,
    History,
    NewItem,
    NewSession,
    Receipt,
    Replayed,
    Session,
    SessionChanges,
    Store,
)

T = TypeVar("T")

_MAILBOX_MAX: Final = 1024
_RETRY_AFTER_MS: Final = 100


class Kind(Enum):
    """Those of one kind overlap, except exclusive ones."""

    READ = "read"
    CHANGE = "change"
    EXCLUSIVE = "exclusive"


class Order:
    """Starts what is submitted, in order of arrival; different kinds never overlap."""

    __slots__ = ("_active", "_kind", "_waiting")

    def __init__(self) -> None:
        self._kind = Kind.READ
        self._active = 0
        self._waiting: deque[tuple[Kind, Callable[[], object]]] = deque()

    @property
    def idle(self) -> bool:
        return not self._active

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, kind: Kind) -> bool:
        """Begin at once if it is this one's turn; `leave` follows then. Otherwise use `wait`."""
        if self._waiting or not self._admits(kind):
            return False
        self._kind = kind
        self._active += 1
        return True

    def wait(self, kind: Kind, start: Callable[[], object]) -> None:
        """Call `start` when it is this one's turn; `leave` follows then."""
        self._waiting.append((kind, start))

    def leave(self) -> None:
        """One that had begun is done."""
        self._active -= 1
        while self._waiting and self._admits(self._waiting[0][0]):
            self._kind, start = self._waiting.popleft()
            self._active += 1
            start()

    def _admits(self, kind: Kind) -> bool:
        return not self._active or (kind is self._kind and kind is not Kind.EXCLUSIVE)


class Actors:
    """The actors of the sessions in use, by session id: made on first use, put away when idle."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._orders: dict[str, Order] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def create(
        self,
        new: NewSession,
        items: Sequence[NewItem],
        receipt: Receipt | None,
        render: Callable[[Session], bytes],
        history: History | None = None,
    ) -> Pending[Session | Replayed]:
        store = self._store
        return self._submit(
            new.session_id,
            lambda: store.create(new, items, history=history, receipt=receipt, render=render),
        )

    def append(
        self,
        session_id: str,
        items: Sequence[NewItem],
        expect: Expect,
        receipt: Receipt | None,
        render: Callable[[Appended], bytes],
    ) -> Pending[Appended | Replayed]:
        store = self._store
        return self._submit(
            session_id,
            lambda: store.append(session_id, items, expect=expect, receipt=receipt, render=render),
        )

    def update(
        self,
        session_id: str,
        changes: SessionChanges,
        expect: Expect,
        receipt: Receipt | None,
        render: Callable[[Session], bytes],
    ) -> Pending[Session | Replayed]:
        store = self._store
        return self._submit(
            session_id,
            lambda: store.update(
                session_id, changes, expect=expect, receipt=receipt, render=render
            ),
        )

    def begin(
        self, session_id: str, receipt: Receipt, expect: Expect = NOTHING_EXPECTED
    ) -> Pending[Session | Replayed]:
        store = self._store
        return self._submit(session_id, lambda: store.begin(session_id, receipt, expect=expect))

    def _submit(self, session_id: str, change: Callable[[], Pending[T]]) -> Pending[T]:
        order = self._order(session_id)
        if order.enter(Kind.CHANGE):
            pending = change()
            pending.on_done(lambda _: self._leave(session_id, order))
            return pending
        if order.waiting >= _MAILBOX_MAX:
            raise Overloaded(retry_after_ms=_RETRY_AFTER_MS)
        outcome: Pending[T] = Pending()

        def start() -> None:
            started = change()
            started.on_done(lambda _: self._leave(session_id, order))
            started.forward(outcome)

        order.wait(Kind.CHANGE, start)
        return outcome

    @asynccontextmanager
    async def exclusive(self, session_id: str) -> AsyncGenerator[None]:
        """Everything before is durable within the block, and everything later waits for its end.

        A cancel while it waits gives up the place in the mailbox.
        """
        order = self._order(session_id)
        if not order.enter(Kind.EXCLUSIVE):
            if order.waiting >= _MAILBOX_MAX:
                raise Overloaded(retry_after_ms=_RETRY_AFTER_MS)
            turn = anyio.Event()
            given_up = False

            def start() -> None:
                if given_up:
                    self._leave(session_id, order)
                else:
                    turn.set()

            order.wait(Kind.EXCLUSIVE, start)
            try:
                await turn.wait()
            except BaseException:
                if turn.is_set():
                    self._leave(session_id, order)
                given_up = True
                raise
        try:
            yield
        finally:
            self._leave(session_id, order)

    def _order(self, session_id: str) -> Order:
        order = self._orders.get(session_id)
        if order is None:
            order = self._orders[session_id] = Order()
        return order

    def _leave(self, session_id: str, order: Order) -> None:
        order.leave()
        if order.idle:
            self._orders.pop(session_id, None)
