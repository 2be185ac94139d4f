"""A connected socket without anyio's stream around it.

anyio's Unix stream gives the event loop a turn before each call, and asks the kernel anew for each
wait; together that is half of the cost of a small request. Here the loop watches the socket for as
long as it is open, and what has arrived is read at once.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator
from typing import Final

import anyio

_buffer: Final = memoryview(bytearray(1 << 18))
"""Of all connections: a read of its own would have the memory mapped and unmapped each time."""


class Stream:
    """One reader and one writer at a time. Errors of the socket are OSError."""

    __slots__ = ("_arrived", "_data", "_error", "_loop", "_socket", "_watched")

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._loop = asyncio.get_running_loop()
        self._watched = False
        self._arrived = asyncio.Event()
        self._data: bytes | None = None
        self._error: OSError | None = None

    @property
    def socket(self) -> socket.socket:
        """For its options and its state."""
        return self._socket

    async def receive(self) -> bytes:
        """What has arrived, 256 KiB at most; empty at the end of the peer's stream."""
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._socket, self._read)
        await self._arrived.wait()
        self._arrived.clear()
        data, self._data = self._data, None
        if data is None:
            raise self._error or BrokenPipeError
        return data

    def _read(self) -> None:
        """The socket is readable; where nobody took the last read, the kernel keeps the rest."""
        if self._data is not None:
            self._unwatch()
            return
        try:
            self._data = bytes(_buffer[: self._socket.recv_into(_buffer)])
        except BlockingIOError:
            return
        except OSError as error:
            self._error = error
        if not self._data:
            self._unwatch()
        self._arrived.set()

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self._socket)

    def try_send(self, data: bytes | memoryview) -> int:
        """Give the kernel what it takes at once; how many bytes that was."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0

    async def send(self, data: bytes) -> None:
        """Send all. A cancel leaves part of it sent: only a close can follow."""
        view = memoryview(data)
        while view:
            sent = self.try_send(view)
            view = view[sent:]
            if view:
                await anyio.wait_writable(self._socket)

    def close(self) -> None:
        self._unwatch()
        self._socket.close()


async def accept(listening: socket.socket) -> AsyncGenerator[Stream | OSError]:
    """Connections as they come, and errors of accept, which are no reason to stop."""
    while True:
        try:
            connected, _ = listening.accept()
        except BlockingIOError:
            await anyio.wait_readable(listening)
        except OSError as error:
            yield error
        else:
            yield Stream(connected)
