"""A connected socket without anyio's stream around it.

anyio's Unix stream gives the event loop a turn before each call, also when nothing has to be waited
for; that is half of the cost of a small request. Here a call first tries, and waits only when the
kernel says so.
"""

import socket
from collections.abc import AsyncIterator

import anyio


class Stream:
    """One reader and one writer at a time. Errors of the socket are OSError."""

    __slots__ = ("_socket",)

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected

    @property
    def socket(self) -> socket.socket:
        """For its options and its state."""
        return self._socket

    async def receive(self, bytes_max: int) -> bytes:
        """What has arrived; empty at the end of the peer's stream."""
        while True:
            try:
                return self._socket.recv(bytes_max)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)

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
        anyio.notify_closing(self._socket)
        self._socket.close()


async def accept(listening: socket.socket) -> AsyncIterator[Stream | OSError]:
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
