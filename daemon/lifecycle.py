"""A daemon from start to stop.

Start: private folders and the store's lock → the store, recovered and swept → the socket's lock,
probe and bind → `ready`. Stop: no new connection and no new request → what is under way ends, or
its time does → answers are sent, connections closed → the store makes what it was given and closes
→ the socket and the locks go.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from enum import IntEnum

import anyio
import msgspec
from anyio.abc import TaskStatus

from recapd.daemon.config import Settings
from recapd.daemon.listener import AlreadyServed, SocketInTheWay, accept_connections, bound_socket
from recapd.daemon.service import Service, Stopping
from recapd.protocol.errors import CompactionFailed
from recapd.storage.database import Damaged, NewerSchema
from recapd.storage.entry import encode_time
from recapd.storage.errors import StorageError, Unsafe
from recapd.storage.lock import Locked, UnsafeFolder
from recapd.storage.sqlite import open_store

logger = logging.getLogger("recapd")


class ExitCode(IntEnum):
    """How `recapd serve` ends."""

    STOPPED = 0
    ALREADY_SERVED = 4
    CANNOT_SERVE = 5


_LAST_WORDS_S = 0.5

_GC_THRESHOLD = 10_000
# Objects made before the young generation is looked through, instead of 700: most of what a request
# makes is freed by its reference count.


_SWITCH_INTERVAL_S = 0.0005
# Instead of 5 ms, with which appends beside a compaction took twice as long.


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _elapsed_ms() -> int:
    return time.monotonic_ns() // 1_000_000


_INTERRUPTED = CompactionFailed(
    stage="interrupted", retryable=True, hint="The server stopped before it was done."
)


async def serve(
    settings: Settings,
    *,
    ready: Callable[[], None],
    now_ms: Callable[[], int] = _now_ms,
    elapsed_ms: Callable[[], int] = _elapsed_ms,
) -> ExitCode:
    """Serve until a signal or `server.shutdown` ends it. `ready` is called once connections are
    taken.

    SIGTERM and SIGINT drain; a second one ends at once. Either way everything acknowledged is
    durable.
    """
    os.umask(0o077)  # SQLite and everything else make files that only their owner can read
    stopping = Stopping()
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(_watch_signals, stopping)
            await _serve(settings, stopping, ready, now_ms, elapsed_ms)
            tasks.cancel_scope.cancel()
        logger.info("stopped")
        return ExitCode.STOPPED
    except* (Locked, AlreadyServed):
        print("recapd: another daemon serves this store or socket", file=sys.stderr)
        return_code = ExitCode.ALREADY_SERVED
    except* (UnsafeFolder, Unsafe, SocketInTheWay):
        print(
            "recapd: a folder or file of the store or socket is not private to this user",
            file=sys.stderr,
        )
        return_code = ExitCode.CANNOT_SERVE
    except* NewerSchema:
        print("recapd: the store was made by a newer recapd", file=sys.stderr)
        return_code = ExitCode.CANNOT_SERVE
    except* Damaged:
        print("recapd: the database is damaged; restore a backup of the store", file=sys.stderr)
        return_code = ExitCode.CANNOT_SERVE
    except* (StorageError, OSError) as errors:
        reasons = ", ".join(sorted({_reason(error) for error in errors.exceptions}))
        print(f"recapd: the store or socket cannot be opened: {reasons}", file=sys.stderr)
        return_code = ExitCode.CANNOT_SERVE
    return return_code


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)  # never str(error), which has the path
    return str(error) if isinstance(error, StorageError) else type(error).__name__


async def _serve(
    settings: Settings,
    stopping: Stopping,
    ready: Callable[[], None],
    now_ms: Callable[[], int],
    elapsed_ms: Callable[[], int],
) -> None:
    interrupted = msgspec.json.encode(_INTERRUPTED.to_wire())
    async with open_store(settings.data_dir, now_ms=now_ms, interrupted=interrupted) as store:
        if store.swept:
            logger.warning("removed %d files that a crash had left", store.swept)
        with bound_socket(settings.socket) as bound:
            async with anyio.create_task_group() as tasks:
                service = Service(
                    store, settings, tasks, stopping, now_ms=now_ms, elapsed_ms=elapsed_ms
                )
                await service.authority.load()
                async with anyio.create_task_group() as connections:
                    connections.start_soon(accept_connections, bound, service, connections)
                    with _collector_at_ease(), _threads_give_way():
                        ready()
                        logger.info("ready")
                        await stopping.asked.wait()
                    await _drain(service)
                    connections.cancel_scope.cancel()
                tasks.cancel_scope.cancel()


@contextmanager
def _collector_at_ease() -> Generator[None]:
    """What start-up made stays; looking through it for garbage again and again costs a tenth."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@contextmanager
def _threads_give_way() -> Generator[None]:
    """A thread that computes keeps the interpreter for as long as that interval whenever the event
    loop or the thread that commits wants it, and each append wants it several times.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)


async def _watch_signals(
    stopping: Stopping, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            stopping.ask("now" if stopping.asked.is_set() else "drain")


async def _drain(service: Service) -> None:
    """Let what is under way end, for as long as it may take."""
    service.draining = True
    service.automatic.stop()
    timeout_s = service.stopping.timeout_s
    if timeout_s is None:
        timeout_s = service.settings.drain_timeout_s
    deadline_ms = service.now_ms() + round(timeout_s * 1000)
    service.subscriptions.draining(encode_time(deadline_ms))
    logger.info("draining, %d connections", len(service.connections))
    with service.stopping.scope as scope:
        scope.deadline = anyio.current_time() + timeout_s
        for connection in service.connections:
            connection.drain()
        while service.connections:
            await service.connection_ended.wait()
        while len(service.compactions):
            await service.compactions.ended.wait()
    service.compactions.cancel_all()
    with anyio.move_on_after(_LAST_WORDS_S):  # what it still waits for is a commit, or a thread
        while len(service.compactions):
            await service.compactions.ended.wait()
    if not service.stopping.hurried:
        # Whoever waited for one is still told how it ended.
        with anyio.move_on_after(_LAST_WORDS_S):
            while service.connections:
                await service.connection_ended.wait()
