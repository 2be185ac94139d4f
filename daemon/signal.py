"""Waking whoever waits for something to happen again."""

import anyio


class Signal:
    """Each `send` wakes all that wait at that moment."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = anyio.Event()

    def send(self) -> None:
        if self._event.statistics().tasks_waiting:
            self._event.set()
            self._event = anyio.Event()

    async def wait(self) -> None:
        await self._event.wait()
