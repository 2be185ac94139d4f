"""Waking whoever waits for something to happen again."""

import asyncio


class Signal:
    """Each `send` wakes all that wait at that moment.

    asyncio's event and not anyio's, which asks at each making which library runs: this is made for
    every wait on the way of a request, and the daemon runs on asyncio only (aiosqlite does).
    """

    __slots__ = ("_event", "_waiting")

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._waiting = 0

    def send(self) -> None:
        if self._waiting:
            self._event.set()
            self._event = asyncio.Event()

    async def wait(self) -> None:
        self._waiting += 1
        try:
            await self._event.wait()
        finally:
            self._waiting -= 1
