"""What a breaker lets through, by a clock of the test's own (`breaker.py`)."""

import pytest

from recapd.daemon.breaker import Breaker


class Clock:
    ms = 0

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    """One that two failures in a row open for 100 ms."""
    return Breaker(2, 100, clock)


def test_it_opens_after_failures_in_a_row_and_lets_one_through_in_time(
    breaker: Breaker, clock: Clock
) -> None:
    assert (breaker.admits, breaker.left_ms, breaker.openings) == (True, 0, 0)
    assert [breaker.fail(), breaker.admits, breaker.fail(), breaker.admits] == [
        *(False, True),
        *(True, False),
    ]
    clock.ms = 99
    assert (breaker.admits, breaker.left_ms) == (False, 1)
    clock.ms = 100
    assert (breaker.admits, breaker.left_ms) == (True, 0)
    breaker.enter()
    assert breaker.admits is False
    breaker.leave()
    assert breaker.admits is True
    breaker.enter()
    assert breaker.fail() is True
    assert (breaker.admits, breaker.left_ms, breaker.openings) == (False, 100, 2)
    clock.ms = 200
    breaker.enter()
    breaker.succeed()
    assert (breaker.admits, breaker.fail(), breaker.admits) == (True, False, True)


def test_what_had_begun_before_it_opened_neither_opens_it_again_nor_longer(
    breaker: Breaker, clock: Clock
) -> None:
    for _ in range(3):
        breaker.enter()
    assert [breaker.fail(), breaker.fail()] == [False, True]
    clock.ms = 50
    assert breaker.fail() is False
    assert (breaker.left_ms, breaker.openings) == (50, 1)
