"""Leaving alone for a while what has failed several times in a row."""

from collections.abc import Callable


class Breaker:
    """Open after `failures_max` failures in a row; then one try is let through after `wait_ms`.

    A success closes it, whoever had it; another failure of the one try opens it anew. `elapsed_ms`
    is a clock that nobody sets.
    """

    def __init__(self, failures_max: int, wait_ms: int, elapsed_ms: Callable[[], int]) -> None:
        self._failures_max = failures_max
        self._wait_ms = wait_ms
        self._elapsed_ms = elapsed_ms
        self._failures = 0
        self._open_until_ms: int | None = None  # None: closed
        self._trying = False  # the one that was let through is under way
        self.openings = 0

    @property
    def admits(self) -> bool:
        """Whether a try may begin; `enter` is to follow then."""
        return self._open_until_ms is None or (not self.left_ms and not self._trying)

    @property
    def left_ms(self) -> int:
        """How long nothing is tried, in milliseconds."""
        return max(0, (self._open_until_ms or 0) - self._elapsed_ms())

    def enter(self) -> None:
        """A try begins; `succeed`, `fail` or `leave` is to follow."""
        self._trying = True

    def leave(self) -> None:
        """It ended without telling anything."""
        self._trying = False

    def succeed(self) -> None:
        """It succeeded."""
        self._trying = False
        self._failures = 0
        self._open_until_ms = None

    def fail(self) -> bool:
        """It failed. Whether that opened the breaker."""
        if self._open_until_ms is not None and not self._trying:
            return False  # one of several at once, the last of which to count has opened it
        self._trying = False
        self._failures += 1
        if self._failures < self._failures_max:
            return False
        self._open_until_ms = self._elapsed_ms() + self._wait_ms
        self.openings += 1
        return True
