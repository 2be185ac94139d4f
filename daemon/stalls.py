"""How long the event loop was held up: nobody was served meanwhile."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

_INTERVAL_S: Final = 0.01


class StallWatch:
    """A timer that should ring a hundred times a second rings as late as the loop was held up.

    What holds it up for less than that may be missed. The timer runs only while there is something
    to do: from `heed` until nobody called it again in time and `busy` says no.
    """

    def __init__(
        self, busy: Callable[[], bool], *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.longest_ms = 0.0
        self._busy = busy
        self._clock_s = clock_s
        self._heeded = False
        self._set = False

    def heed(self) -> None:
        """Something is about to be done."""
        self._heeded = True
        if not self._set:
            self._wind()

    def _wind(self) -> None:
        self._set = True
        due_s = self._clock_s() + _INTERVAL_S
        asyncio.get_running_loop().call_later(_INTERVAL_S, self._ring, due_s)

    def _ring(self, due_s: float) -> None:
        self.longest_ms = max(self.longest_ms, (self._clock_s() - due_s) * 1000)
        self._set = False
        if self._heeded or self._busy():
            self._heeded = False
            self._wind()
