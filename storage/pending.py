"""The outcome of a change that was handed over and is not durable yet."""

from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

T = TypeVar("T")


class Pending(Generic[T]):
    """One outcome, set once, on the event loop's thread.

    A change goes on when nobody waits for it any more: a cancelled `wait` neither undoes nor hides
    it. Callbacks run in the order in which they were added; they must not raise.
    """

    __slots__ = ("_callbacks", "_error", "_value", "done")

    def __init__(self) -> None:
        self.done = False
        self._value: T | None = None
        self._error: Exception | None = None
        self._callbacks: list[Callable[[Pending[T]], None]] = []

    def resolve(self, value: T) -> None:
        """Set the result and run the callbacks."""
        self._value = value
        self._finish()

    def reject(self, error: Exception) -> None:
        """Set the error and run the callbacks."""
        self._error = error
        self._finish()

    def _finish(self) -> None:
        self.done = True
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()

    def on_done(self, callback: "Callable[[Pending[T]], None]") -> None:
        """Call back once there is an outcome; at once when there is one already."""
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def forward(self, other: "Pending[T]") -> None:
        """Give `other` the same outcome."""

        def settle(done: "Pending[T]") -> None:
            if done._error is not None:
                other.reject(done._error)
            else:
                other.resolve(done.result())

        self.on_done(settle)

    @property
    def failed(self) -> bool:
        """Whether there is an error."""
        return self._error is not None

    def result(self) -> T:
        """The result of a done change; raises its error."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # done and no error: resolve() was called with a T

    async def settled(self) -> None:
        """Wait until there is an outcome, whichever."""
        if not self.done:
            event = anyio.Event()
            self.on_done(lambda _: event.set())
            await event.wait()

    async def wait(self) -> T:
        """Wait for the outcome; raises its error."""
        await self.settled()
        return self.result()
