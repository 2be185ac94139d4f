"""The socket: made safely, and accepting for as long as the daemon runs (PROTOCOL.md §1, §7).

anyio's own listener would remove a live socket and set the mode after bind, and its `serve` ends
with the first error of accept.
"""

import errno
import logging
import os
import socket
import stat
import struct
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
from anyio.abc import TaskGroup

from recapd.daemon.authority import owner
from recapd.daemon.connection import Connection
from recapd.daemon.service import Service
from recapd.daemon.stream import Stream, accept
from recapd.protocol.codec import NULL, encode_error
from recapd.protocol.errors import Overloaded
from recapd.storage.lock import Locked, hold, make_private_folder

logger = logging.getLogger("recapd.listener")

_BACKLOG: Final = 1024
_PROBE_TIMEOUT_S: Final = 2.0
_RETRY_S: Final = 0.1
_RETRY_AFTER_MS: Final = 1000


class AlreadyServed(Exception):
    """A daemon answers on that socket, or is about to."""


class SocketInTheWay(Exception):
    """Something that is no socket of ours lies where the socket should be."""


@contextmanager
def bound_socket(path: Path) -> Generator[socket.socket]:
    """Bind a listening socket of mode 0600 at `path`; it is removed at the end of the block.

    A lock beside it makes sure that of two that start at once one gets it. A socket that nobody
    listens on any more is taken over, a live one never.

    Raises AlreadyServed, SocketInTheWay, UnsafeFolder, OSError.
    """
    make_private_folder(path.parent)
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(path.with_name(f"{path.name}.lock")))
        except Locked as error:
            raise AlreadyServed from error
        _remove_stale(path)
        bound = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        bound.setblocking(False)
        mask = os.umask(0o177)  # the mode is right from the first moment: bind(2) applies the umask
        try:
            bound.bind(str(path))
        finally:
            os.umask(mask)
        identity = _identity(path)
        try:
            bound.listen(_BACKLOG)
            yield bound
        finally:
            with suppress(FileNotFoundError):
                if _identity(path) == identity:  # not one that somebody put in its place
                    path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _remove_stale(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise SocketInTheWay
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:  # a full backlog is somebody's
            raise AlreadyServed from error
    raise AlreadyServed


async def accept_connections(bound: socket.socket, service: Service, tasks: TaskGroup) -> None:
    """Accept until cancelled. One connection never ends another."""
    async for stream in accept(bound):
        if isinstance(stream, OSError):
            # Out of descriptors, most likely: those that are open go on, the next wait in the
            # backlog.
            logger.warning("accept: %s", errno.errorcode.get(stream.errno or 0, "error"))
            await anyio.sleep(_RETRY_S)
        else:
            tasks.start_soon(_serve, stream, service)


async def _serve(stream: Stream, service: Service) -> None:
    credentials = stream.socket.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    _, uid, _ = struct.unpack("3i", credentials)
    if uid != os.geteuid():
        logger.warning("refused a connection of another user")
        stream.close()
        return
    if service.draining:
        stream.close()
        return
    if len(service.connections) >= service.limits.connections:
        with suppress(OSError):
            refusal = encode_error(NULL, Overloaded(retry_after_ms=_RETRY_AFTER_MS))
            stream.try_send(refusal + b"\n")
        stream.close()
        return
    connection = Connection(stream, owner(uid), service)
    service.connections.add(connection)
    try:
        await connection.serve()
    except* Exception as errors:
        logger.error(
            "a connection ended: %s",
            ", ".join(sorted({type(e).__name__ for e in errors.exceptions})),
        )
    finally:
        service.connections.discard(connection)
        service.connection_ended.send()
