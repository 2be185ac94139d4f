"""The watch over the event loop, and what `server.health` tells of it."""

import time

import anyio
import anyio.lowlevel
import pytest
from tests.daemon.conftest import Peer

from recapd.daemon.stalls import StallWatch
from recapd.storage.sqlite import SqliteStore
from recapd.storage.store import Revision


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_timer_that_rings_late_tells_how_long_nobody_was_served() -> None:
    clock = Clock()
    asked = 0

    def busy() -> bool:
        nonlocal asked
        asked += 1
        return asked < 3

    watch = StallWatch(busy, clock_s=clock)
    watch.heed()
    clock.now_s += 0.51  # of which 10 ms were meant
    with anyio.fail_after(10):
        while asked < 1:
            await anyio.lowlevel.checkpoint()
    assert round(watch.longest_ms) == 500
    clock.now_s += 0.2
    with anyio.fail_after(10):
        while asked < 3:
            await anyio.lowlevel.checkpoint()
    assert round(watch.longest_ms) == 500  # the longest, not the last
    watch.heed()  # it had stopped
    clock.now_s += 0.71
    with anyio.fail_after(10):
        while asked < 4:
            await anyio.lowlevel.checkpoint()
    assert round(watch.longest_ms) == 700


async def test_health_tells_of_the_longest_stall(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def computes(*_: object) -> list[Revision]:
        end_s = time.monotonic() + 0.3
        while time.monotonic() < end_s:
            pass
        return []

    await peer.call("session.create", session_id="a")
    monkeypatch.setattr(SqliteStore, "revisions", computes)
    await peer.call("session.revisions", session_id="a")
    await peer.until(lambda health: health["event_loop"]["longest_stall_ms"] > 280, "server.health")
