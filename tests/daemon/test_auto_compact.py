"""Compactions that nobody asks for (docs/protocol.md §5, "Automatic compaction")."""

import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import pytest
from tests.daemon.conftest import WAIT_S, Daemon, Gate, Message, Peer, request, user
from tests.daemon.test_compact import DEVELOPER, SYSTEM, ends, look, reminder

from recapd.daemon.authority import Principal
from recapd.protocol.errors import (
    CompactionFailed,
    CompactionRunning,
    Forbidden,
    InvalidParams,
    OperationIdReused,
)
from recapd.protocol.methods import SCOPES
from recapd.storage.ledger import Ledger

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

BIG: Final = user("word " * 1000)
"""About 1250 tokens by its bytes; a summary of several has about 1600."""

LINE: Final[Message] = {"at_tokens": 4000}
"""Crossed by the fourth of them."""

DOWN: Final = CompactionFailed(stage="summarise", provider_status=503, retryable=True)
"""As when the provider of a summarizer is down."""

UNFIT: Final = CompactionFailed(stage="accept", hint="The model refused.")
"""As when a model will not summarise just this history."""

WAIT_MS: Final = 600_000  # the default of `breaker_wait_s`


class Clock:
    """The time that a daemon goes by."""

    def __init__(self) -> None:
        self.ms = 1_796_083_200_000  # 2026-12-01T00:00:00Z

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def append(peer: Peer, *items: Message, session_id: str = "a") -> Any:
    return await peer.call("session.append", session_id=session_id, items=list(items))


async def cross(peer: Peer, session_id: str) -> None:
    """Make a session that is over its line."""
    await peer.call("session.create", session_id=session_id, items=[BIG] * 4, auto_compact=LINE)


async def ended(peer: Peer, count: int, session_id: str = "a") -> list[tuple[str, str | None]]:
    """Status and reason of each compaction, once so many have finished."""

    def enough(answer: Any) -> bool:
        methods = [event["method"] for event in answer["events"]]
        return methods.count("compaction.finished") >= count

    await peer.until(enough, "session.events", session_id=session_id, since=0, limit=10_000)
    return await ends(peer, session_id)


async def quiet(peer: Peer, session_id: str = "a") -> list[tuple[str, str | None]]:
    """The same now. Whatever a change before has set off has begun: it was handed over earlier."""
    await peer.call("session.update", session_id=session_id)
    return await ends(peer, session_id)


async def session(peer: Peer, session_id: str = "a") -> Any:
    return (await peer.call("session.get", session_id=session_id, view="info"))["session"]


async def started(peer: Peer, session_id: str = "a") -> str:
    """The operation of the latest compaction, once there is one."""

    def operations(answer: Any) -> list[str]:
        events = answer["events"]
        return [e["operation_id"] for e in events if e["method"] == "compaction.started"]

    params: Message = {"session_id": session_id, "since": 0, "limit": 10_000}
    answer = await peer.until(lambda one: bool(operations(one)), "session.events", **params)
    return operations(answer)[-1]


# The setting.


async def test_the_setting_is_kept_changed_and_cleared(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.update`: absent keeps, null clears; null where it is off."""
    created = await peer.call("session.create", session_id="a", auto_compact=LINE)
    shown = {"at_tokens": 4000, "keep_recent_tokens": 0, "instructions": None, "summarizer": None}
    assert created["session"]["auto_compact"] == shown
    await peer.call("session.update", session_id="a", title="t")
    assert (await session(peer))["auto_compact"] == shown
    (listed,) = (await peer.call("session.list"))["sessions"]
    assert listed["auto_compact"] == shown
    full: Message = {
        "at_tokens": 1000,
        "keep_recent_tokens": 999,
        "instructions": "all \x00 of it",
        "summarizer": "offline",
    }
    updated = await peer.call("session.update", session_id="a", auto_compact=full)
    assert updated["session"]["auto_compact"] == full
    cleared = await peer.call("session.update", session_id="a", auto_compact=None)
    assert cleared["session"]["auto_compact"] is None
    assert (await session(peer))["auto_compact"] is None


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        ({}, "$.auto_compact.at_tokens"),
        ({"at_tokens": 999}, "$.auto_compact.at_tokens"),
        ({"at_tokens": 1000, "keep_recent": 1}, "$.auto_compact.keep_recent"),
        ({"at_tokens": 1000, "keep_recent_tokens": 1000}, "$.auto_compact.keep_recent_tokens"),
        ({"at_tokens": 1000, "instructions": ""}, "$.auto_compact.instructions"),
        ({"at_tokens": 1000, "instructions": "x" * 4001}, "$.auto_compact.instructions"),
        ({"at_tokens": 1000, "summarizer": "magic"}, "$.auto_compact.summarizer"),
        ({"at_tokens": 1000, "summarizer": "chat"}, "$.auto_compact.summarizer"),
    ],
)
async def test_a_setting_that_could_never_work_is_refused(
    peer: Peer, setting: Message, path: str
) -> None:
    """It is found out when it is set, not when it is needed."""
    await peer.call("session.create", session_id="a")
    for method, session_id in (("session.create", "b"), ("session.update", "a")):
        with pytest.raises(InvalidParams) as caught:
            await peer.call(method, session_id=session_id, auto_compact=setting)
        (error,) = caught.value.data["errors"]
        assert error["path"].startswith(path.rpartition(".")[0])
        assert path.startswith(error["path"])
    (listed,) = (await peer.call("session.list"))["sessions"]
    assert (listed["session_id"], listed["auto_compact"]) == ("a", None)


async def test_whoever_may_not_compact_may_not_have_it_done(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL.md §7: scope `session.compact`."""
    scopes = frozenset(SCOPES) - {"session.compact"}

    def narrowed(uid: int) -> Principal:
        return Principal(uid, scopes)

    monkeypatch.setattr("recapd.daemon.listener.owner", narrowed)
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a")
        for auto_compact in (LINE, None):
            with pytest.raises(Forbidden) as caught:
                await peer.call("session.update", session_id="a", auto_compact=auto_compact)
            assert caught.value.data == {"scope": "session.compact"}
        with pytest.raises(Forbidden):
            await peer.call("session.create", session_id="b", auto_compact=LINE)
        await peer.call("session.update", session_id="a", title="t")


# When.


async def test_the_append_that_crosses_the_line_is_followed_by_a_compaction(peer: Peer) -> None:
    """The answer does not wait; what follows is an operation and events like any other."""
    await peer.call("session.create", session_id="a", auto_compact=LINE)
    before = await append(peer, SYSTEM, BIG, BIG, BIG)
    assert before["session"]["tokens"]["count"] < 4000
    assert await quiet(peer) == []
    crossed = await append(peer, BIG)
    assert (crossed["session"]["revision"], crossed["session"]["generation"]) == (2, 0)
    assert crossed["session"]["tokens"]["count"] >= 4000
    assert await ended(peer, 1) == [("completed", None)]
    after = await session(peer)
    assert (after["revision"], after["generation"], after["entries"]) == (3, 1, 2)
    assert after["tokens"]["count"] < 4000
    assert (await peer.items("a"))[0] == SYSTEM
    assert await peer.items("a", revision=2) == [SYSTEM, BIG, BIG, BIG, BIG]
    events = (await peer.call("session.events", session_id="a", since=0))["events"]
    assert [event["method"] for event in events[-3:]] == [
        "compaction.started",
        "history.replaced",
        "compaction.finished",
    ]
    (operation_id,) = {event["operation_id"] for event in events[-3:]}
    operation = (await peer.call("operation.get", operation_id=operation_id))["operation"]
    assert (operation["method"], operation["status"]) == ("session.compact", "completed")
    assert operation["result"]["tokens_before"] == crossed["session"]["tokens"]
    assert operation["result"]["session"] == after
    with pytest.raises(OperationIdReused):
        await peer.call("session.compact", session_id="a", operation_id=operation_id)


async def test_the_line_itself_is_over_it(peer: Peer) -> None:
    """`at_tokens` or more. A limit that is set where it is crossed already counts from then on."""
    count = (await peer.call("session.create", session_id="a", items=[BIG] * 4))["session"][
        "tokens"
    ]["count"]
    await peer.call("session.update", session_id="a", auto_compact={"at_tokens": count + 1})
    assert await quiet(peer) == []
    await peer.call("session.update", session_id="a", auto_compact={"at_tokens": count})
    assert await ended(peer, 1) == [("completed", None)]


async def test_a_session_may_be_created_over_its_line(peer: Peer) -> None:
    await cross(peer, "a")
    assert await ended(peer, 1) == [("completed", None)]
    assert (await session(peer))["archived_revisions"] == [1]


async def test_it_is_made_as_the_setting_says(peer: Peer) -> None:
    """PROTOCOL.md §5: `keep_recent_tokens` and `instructions`, as in `session.compact`."""
    setting: Message = {
        **LINE,
        "keep_recent_tokens": 100,
        "instructions": "the colour of the roof",
        "summarizer": "offline",
    }
    await peer.call("session.create", session_id="a", auto_compact=setting)
    await append(peer, BIG, BIG, BIG, BIG, user("the last one"))
    assert await ended(peer, 1) == [("completed", None)]
    summary, last = await peer.items("a")
    assert "the colour of the roof" in summary["content"][0]["text"]
    assert last == user("the last one")


async def test_the_default_summarizer_is_used_where_none_is_named(start: Start) -> None:
    """And one that is not configured fails, aloud: never another one instead."""
    async with start(default_summarizer="chat") as daemon, daemon.connect() as peer:
        await cross(peer, "a")
        assert await ended(peer, 1) == [("failed", "compaction_failed")]
        operation = await peer.call("operation.get", operation_id=await started(peer))
        assert operation["operation"]["error"]["data"]["stage"] == "configure"
        with pytest.raises(CompactionFailed) as caught:
            await peer.call("session.compact", session_id="a")
        assert caught.value.data["stage"] == "configure"
        setting: Message = {**LINE, "summarizer": "offline"}
        await peer.call("session.update", session_id="a", auto_compact=setting)
        assert (await ended(peer, 2))[1] == ("completed", None)


async def test_other_changes_set_nothing_off(peer: Peer, gate: Gate) -> None:
    """Only what adds items or changes the limit: at most one for each append (BUGLOG B08)."""
    gate.fails_with = UNFIT
    gate.open()
    await cross(peer, "a")
    failed = [("failed", "compaction_failed")]
    assert await ended(peer, 1) == failed
    await peer.call("session.update", session_id="a", title="t")
    await peer.call("session.get", session_id="a")
    await peer.call("session.update", session_id="a", state="archived")
    assert await quiet(peer) == failed
    await peer.call("session.update", session_id="a", auto_compact=LINE)  # takes no compaction
    await peer.call("session.update", session_id="a", state="active")
    assert await quiet(peer) == failed
    await append(peer, user("x"), session_id="a")
    assert await ended(peer, 2) == failed * 2
    assert gate.entered == 2


async def test_a_repeated_append_sets_nothing_off_again(peer: Peer, gate: Gate) -> None:
    """PROTOCOL.md §2: with the same operation id nothing happens but the answer."""
    gate.fails_with = UNFIT
    gate.open()
    await peer.call("session.create", session_id="a", auto_compact=LINE)
    params: Message = {"session_id": "a", "items": [BIG] * 4, "operation_id": "op"}
    await peer.call("session.append", **params)
    assert len(await ended(peer, 1)) == 1
    assert (await peer.call("session.append", **params))["replayed"] is True
    assert len(await quiet(peer)) == 1


async def test_many_appends_at_once_set_off_one(peer: Peer, gate: Gate) -> None:
    """Of one commit or of several: what is under way is not begun again."""
    await peer.call("session.create", session_id="a", auto_compact=LINE)
    ids = [await peer.ask("session.append", session_id="a", items=[BIG]) for _ in range(20)]
    for id in ids:
        await peer.result(id)
    await gate.reached()
    gate.open()
    assert await ended(peer, 1) == [("completed", None)]
    assert await quiet(peer) == [("completed", None)]
    assert gate.entered == 1
    entries = await peer.entries("a")
    assert [entry["item"] for entry in entries[1:]] == [BIG] * (len(entries) - 1)


async def test_a_client_that_leaves_does_not_matter_to_it(
    daemon: Daemon, peer: Peer, gate: Gate
) -> None:
    async with daemon.connect() as other:
        await cross(other, "a")
        await gate.reached()
    gate.open()
    assert await ended(peer, 1) == [("completed", None)]


# When it is of no use.


async def test_by_hand_is_enough(peer: Peer, gate: Gate) -> None:
    """BUGLOG B07: the figure is that of the new history, so a short append sets off nothing."""
    gate.open()
    await peer.call("session.create", session_id="a", items=[BIG] * 4)
    await peer.call("session.compact", session_id="a")
    await peer.call("session.update", session_id="a", auto_compact=LINE)
    await append(peer, user("these words are only five"))
    assert await quiet(peer) == [("completed", None)]
    assert gate.entered == 1


@pytest.mark.parametrize(
    ("items", "reason", "asked"),
    [([], "nothing_to_compact", 0), ([user("go on")], "no_gain", 1)],
)
async def test_what_must_stay_over_the_line_is_tried_once(
    peer: Peer, gate: Gate, items: list[Message], reason: str, asked: int
) -> None:
    """BUGLOG B08: a system message of 90 % of the line and ten reminders of 2 % each."""
    gate.open()
    line = 2000

    def percent(share: float) -> str:
        return "0 " * int(share / 100 * line * 2)

    stay = [{"role": "system", "content": percent(90)}, *[reminder(percent(2))] * 10]
    await peer.call(
        "session.create", session_id="a", items=stay + items, auto_compact={"at_tokens": line}
    )
    assert await ended(peer, 1) == [("skipped", reason)]
    sent = [user(f"message {number}") for number in range(50)]
    for message in sent:
        await append(peer, message)
    assert await quiet(peer) == [("skipped", reason)]
    assert gate.entered == asked
    assert await peer.items("a") == stay + items + sent  # and no message that nobody sent
    assert (await session(peer))["archived_revisions"] == []


async def test_a_result_that_is_not_smaller_is_refused_before_its_commit(
    peer: Peer, gate: Gate
) -> None:
    """BUGLOG B06: `no_gain`, with the history untouched; a client may compact all the same."""
    gate.open()
    items = [{"role": "system", "content": "0 " * 3000}, user("a")]
    await peer.call("session.create", session_id="a", items=items, auto_compact={"at_tokens": 1000})
    assert await ended(peer, 1) == [("skipped", "no_gain")]
    operation = (await peer.call("operation.get", operation_id=await started(peer)))["operation"]
    assert (operation["status"], operation["error"]["data"]["reason"]) == ("skipped", "no_gain")
    assert await peer.items("a") == items
    unchanged = await session(peer)
    assert (unchanged["revision"], unchanged["archived_revisions"]) == (1, [])
    result = await peer.call("session.compact", session_id="a")
    assert result["tokens_before"] == unchanged["tokens"]
    assert result["tokens_after"]["count"] > result["tokens_before"]["count"]


async def test_a_new_generation_or_another_setting_is_a_new_try(peer: Peer, gate: Gate) -> None:
    """What gave no gain is not repeated in its generation, with its setting."""
    gate.open()
    items = [{"role": "system", "content": "0 " * 3000}, user("a")]
    setting: Message = {"at_tokens": 1000}
    await peer.call("session.create", session_id="a", items=items, auto_compact=setting)
    skipped = ("skipped", "no_gain")
    assert await ended(peer, 1) == [skipped]
    await peer.call("session.update", session_id="a", auto_compact={"at_tokens": 1001})
    assert await ended(peer, 2) == [skipped] * 2
    await append(peer, user("b"))
    assert await quiet(peer) == [skipped] * 2
    await peer.call("session.compact", session_id="a")
    assert await quiet(peer) == [*[skipped] * 2, ("completed", None)]
    await append(peer, user("c"))
    assert await ended(peer, 4) == [*[skipped] * 2, ("completed", None), skipped]
    await append(peer, user("d"))
    assert len(await quiet(peer)) == 4


async def test_what_is_smaller_and_still_over_the_line_is_kept_and_said_once(
    peer: Peer, gate: Gate
) -> None:
    """It is a gain; but another try in the new generation would be the beginning of a loop."""
    gate.open()
    items = [{"role": "system", "content": "word " * 1000}, BIG, BIG, BIG]
    setting: Message = {"at_tokens": 1001}
    await peer.call("session.create", session_id="a", items=items, auto_compact=setting)
    assert await ended(peer, 1) == [("completed", None)]
    assert (await session(peer))["tokens"]["count"] > 1001
    assert await quiet(peer) == [("completed", None)]
    for number in range(10):
        await append(peer, user(f"{number}"))
    assert await ended(peer, 2) == [("completed", None), ("skipped", "no_gain")]
    assert len(await quiet(peer)) == 2
    assert gate.entered == 1
    assert (await session(peer))["generation"] == 1


async def test_what_was_appended_meanwhile_is_no_lack_of_gain(peer: Peer, gate: Gate) -> None:
    """The session is over its line again by what came meanwhile: the next append decides."""
    await cross(peer, "a")
    await gate.reached()
    late = [BIG] * 4
    await append(peer, *late)
    gate.open()
    assert await ended(peer, 1) == [("completed", None)]
    assert (await peer.items("a"))[1:] == late
    assert (await session(peer))["tokens"]["count"] > 4000
    await append(peer, user("x"))
    assert await ended(peer, 2) == [("completed", None)] * 2
    assert (await session(peer))["tokens"]["count"] < 4000


async def test_a_result_over_the_limit_is_not_tried_again(start: Start, gate: Gate) -> None:
    """PROTOCOL.md §5.3; nor does it count as a failure of the summarizer."""
    gate.open()
    async with start(context_limit=100) as daemon, daemon.connect() as peer:
        for name in "abcd":
            await cross(peer, name)
            assert await ended(peer, 1, name) == [("failed", "result_too_large")]
            await append(peer, user("x"), session_id=name)
            assert len(await quiet(peer, name)) == 1
        assert gate.entered == 4


# Breakers.


async def test_a_summarizer_that_is_down_is_left_alone_by_every_session(
    start: Start, gate: Gate, clock: Clock
) -> None:
    """Three failures in a row, ten minutes; said once for each session, and by `server.health`."""
    gate.fails_with = DOWN
    gate.open()
    async with start(elapsed_ms=clock) as daemon, daemon.connect() as peer:
        failed, skipped = ("failed", "compaction_failed"), ("skipped", "breaker_open")
        for name in "abc":
            assert (await peer.call("server.health"))["warnings"] == []
            await cross(peer, name)
            assert await ended(peer, 1, name) == [failed]
        for name in "ad":
            await (append(peer, user("x"), session_id=name) if name == "a" else cross(peer, name))
            told = await ended(peer, 2 if name == "a" else 1, name)
            assert told[-1] == skipped
            for _ in range(5):
                await append(peer, user("x"), session_id=name)
            assert await quiet(peer, name) == told
        assert gate.entered == 3
        operation = await peer.call("operation.get", operation_id=await started(peer, "d"))
        error = operation["operation"]["error"]
        assert (error["data"]["reason"], error["data"]["retryable"]) == ("breaker_open", True)
        assert error["data"]["retry_after_ms"] == WAIT_MS
        health = await peer.call("server.health")
        (warning,) = health["warnings"]
        assert (health["ok"], warning["reason"]) == (False, "automatic_compaction_waits")
        assert "offline" in warning["hint"]
        assert "session.compact" in warning["hint"]

        clock.ms += WAIT_MS - 1
        await append(peer, user("x"), session_id="d")
        assert await quiet(peer, "d") == [skipped]
        clock.ms += 1
        assert (await peer.call("server.health"))["ok"] is True
        gate.close()
        await append(peer, user("x"), session_id="d")  # the one that is let through
        await gate.reached(4)
        await append(peer, user("x"), session_id="a")
        assert await quiet(peer, "a") == [failed, skipped]
        gate.open()
        assert await ended(peer, 2, "d") == [skipped, failed]
        await append(peer, user("x"), session_id="d")
        assert await ended(peer, 3, "d") == [skipped, failed, skipped]  # open again, said again
        assert (await peer.call("server.health"))["ok"] is False

        clock.ms += WAIT_MS
        gate.fails_with = None
        await append(peer, user("x"), session_id="d")
        assert (await ended(peer, 4, "d"))[-1] == ("completed", None)
        gate.fails_with = DOWN
        for count in (3, 4, 5):
            assert (await peer.call("server.health"))["ok"] is True
            await append(peer, user("x"), session_id="a")
            assert (await ended(peer, count, "a"))[-1] == failed
        assert (await peer.call("server.health"))["ok"] is False


async def test_a_client_is_not_held_up_and_its_success_ends_the_waiting(
    start: Start, gate: Gate, clock: Clock
) -> None:
    gate.fails_with = DOWN
    gate.open()
    async with start(elapsed_ms=clock, breaker_failures=1) as daemon, daemon.connect() as peer:
        await cross(peer, "a")
        assert await ended(peer, 1) == [("failed", "compaction_failed")]
        await peer.call("session.create", session_id="b", items=[BIG])
        for _ in range(2):
            with pytest.raises(CompactionFailed):
                await peer.call("session.compact", session_id="b")
        assert (await peer.call("server.health"))["ok"] is False
        await peer.call("session.compact", session_id="b", summary="mine")
        assert (await peer.call("server.health"))["ok"] is False  # which says nothing of the other
        gate.fails_with = None
        await peer.call("session.compact", session_id="b", force=True)
        assert (await peer.call("server.health"))["ok"] is True
        await append(peer, user("x"))
        assert (await ended(peer, 2))[-1] == ("completed", None)


async def test_a_history_that_cannot_be_summarised_holds_up_no_other_session(
    start: Start, gate: Gate, clock: Clock
) -> None:
    """Only what its provider is to blame for counts against a summarizer."""
    gate.fails_with = UNFIT
    gate.open()
    async with start(elapsed_ms=clock) as daemon, daemon.connect() as peer:
        failed, skipped = ("failed", "compaction_failed"), ("skipped", "breaker_open")
        await cross(peer, "a")
        for count in (1, 2, 3):
            assert await ended(peer, count) == [failed] * count
            await append(peer, user("x"))
        assert await ended(peer, 4) == [*[failed] * 3, skipped]
        (warning,) = (await peer.call("server.health"))["warnings"]
        assert "1 session," in warning["hint"]
        gate.fails_with = None
        await cross(peer, "b")
        assert await ended(peer, 1, "b") == [("completed", None)]
        await append(peer, user("x"))
        assert len(await quiet(peer)) == 4
        await peer.call("session.compact", session_id="a", summary="mine")
        assert (await peer.call("server.health"))["ok"] is True
        await append(peer, *[BIG] * 4)
        assert (await ended(peer, 6))[-1] == ("completed", None)


async def test_an_unexpected_fault_counts_against_its_session(
    start: Start, gate: Gate, clock: Clock, incidents: list[str]
) -> None:
    """Whatever is wrong, an agent that goes on appending does not repeat it without end."""
    gate.fails_with = ZeroDivisionError()
    gate.open()
    incidents += ["ZeroDivisionError"] * 3
    async with start(elapsed_ms=clock) as daemon, daemon.connect() as peer:
        await cross(peer, "a")
        for count in range(1, 10):
            await append(peer, user("x"))
            await ended(peer, min(count, 4))
        assert await quiet(peer) == [
            *[("failed", "internal_error")] * 3,
            ("skipped", "breaker_open"),
        ]
        assert gate.entered == 3


async def test_only_failures_in_a_row_open_a_breaker(
    start: Start, gate: Gate, clock: Clock
) -> None:
    """A cancel, and a summary that was made, are no failures; a success in between counts."""
    gate.fails_with = DOWN
    async with start(elapsed_ms=clock, breaker_failures=2) as daemon, daemon.connect() as peer:
        await cross(peer, "a")
        for count in (1, 2, 3):
            await gate.reached(count)
            await peer.call("operation.cancel", operation_id=await started(peer))
            assert await ended(peer, count) == [("cancelled", "cancelled")] * count
            await append(peer, user("x"))
        await gate.reached(4)
        gate.open()
        assert (await ended(peer, 4))[-1] == ("failed", "compaction_failed")
        gate.fails_with = None
        system: Message = {"role": "system", "content": "0 " * 3000}
        await peer.call(
            "session.create",
            session_id="b",
            items=[system, user("a")],
            auto_compact={"at_tokens": 1000},
        )
        assert await ended(peer, 1, "b") == [("skipped", "no_gain")]
        gate.fails_with = DOWN
        await append(peer, user("x"))
        assert (await ended(peer, 5))[-1] == ("failed", "compaction_failed")
        assert (await peer.call("server.health"))["ok"] is True
        await append(peer, user("x"))
        await ended(peer, 6)
        assert (await peer.call("server.health"))["ok"] is False


async def test_a_try_that_tells_nothing_leaves_the_way_open_for_the_next(
    start: Start, gate: Gate, clock: Clock
) -> None:
    """The one that is let through may be cancelled, or may not have begun."""
    gate.fails_with = DOWN
    gate.open()
    async with start(elapsed_ms=clock, breaker_failures=1) as daemon, daemon.connect() as peer:
        await cross(peer, "a")
        await ended(peer, 1)
        clock.ms += WAIT_MS
        gate.close()
        await append(peer, user("x"))
        await gate.reached(2)
        await peer.call("operation.cancel", operation_id=await started(peer))
        assert (await ended(peer, 2))[-1] == ("cancelled", "cancelled")
        gate.fails_with = None
        gate.open()
        await append(peer, user("x"))
        assert (await ended(peer, 3))[-1] == ("completed", None)


async def test_one_that_could_not_begin_tells_nothing_either(
    start: Start, gate: Gate, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's own began while the append was written: that uses up no try and no report."""
    written = threading.Event()
    written.set()
    add = Ledger.append

    def slow(self: Ledger, *arguments: Any) -> Any:
        assert written.wait(WAIT_S)
        return add(self, *arguments)

    monkeypatch.setattr(Ledger, "append", slow)
    gate.fails_with = DOWN
    gate.open()
    async with (
        start(elapsed_ms=clock, breaker_failures=1) as daemon,
        daemon.connect() as peer,
        daemon.connect() as other,
    ):
        await cross(peer, "a")
        told: list[tuple[str, str | None]] = [("failed", "compaction_failed")]
        assert await ended(peer, 1) == told
        gate.close()
        for operation_id in ("one", "two"):
            written.clear()
            appending = await peer.ask("session.append", session_id="a", items=[user("x")])
            await peer.call("protocol.ping")
            compacting = await other.ask(
                "session.compact", session_id="a", wait=False, operation_id=operation_id
            )
            for _ in range(5):  # by now its beginning waits behind the append
                await other.call("protocol.ping")
            written.set()
            assert (await peer.result(appending))["session"]["busy"] is False
            assert (await other.result(compacting))["status"] == "running"
            await peer.call("operation.cancel", operation_id=operation_id)
            told.append(("cancelled", "cancelled"))
            assert await quiet(peer) == told
            if operation_id == "two":
                gate.fails_with = None
                gate.open()
            await append(peer, user("x"))
            told.append(
                ("skipped", "breaker_open") if operation_id == "one" else ("completed", None)
            )
            assert await ended(peer, len(told)) == told
            clock.ms += WAIT_MS


# Beside others.


async def test_what_is_appended_while_it_runs_is_carried_over(peer: Peer, gate: Gate) -> None:
    """PROTOCOL.md §5.4; and there is no second one, however far over the line it is."""
    await cross(peer, "a")
    await gate.reached()
    late = [user(f"late {number}") for number in range(20)]
    for item in late:
        assert (await append(peer, item))["session"]["busy"] is True
    await append(peer, DEVELOPER)
    gate.open()
    assert await ended(peer, 1) == [("completed", None)]
    assert (await peer.items("a"))[1:] == [*late, DEVELOPER]
    assert await quiet(peer) == [("completed", None)]
    assert gate.entered == 1


async def test_a_client_is_told_which_one_runs(peer: Peer, gate: Gate) -> None:
    """PROTOCOL.md §6, `compaction_running`: as for any other."""
    await cross(peer, "a")
    await gate.reached()
    with pytest.raises(CompactionRunning) as caught:
        await peer.call("session.compact", session_id="a")
    assert caught.value.data == {"operation_id": await started(peer)}
    wait = await peer.ask(
        "operation.get", operation_id=caught.value.data["operation_id"], wait_ms=600_000
    )
    gate.open()
    assert (await peer.result(wait))["operation"]["status"] == "completed"
    assert gate.entered == 1


async def test_none_is_begun_beside_that_of_a_client(peer: Peer, gate: Gate) -> None:
    """When that has ended, the next append decides by the new figure (BUGLOG B07)."""
    await peer.call(
        "session.create", session_id="a", items=[BIG] * 3, auto_compact={"at_tokens": 5000}
    )
    compact = await peer.ask("session.compact", session_id="a", operation_id="mine")
    await gate.reached()
    await append(peer, BIG, BIG)
    await append(peer, user("x"))
    gate.open()
    assert (await peer.result(compact))["operation_id"] == "mine"
    assert await quiet(peer) == [("completed", None)]
    await append(peer, user("five words are not many"))
    assert await ended(peer, 2) == [("completed", None)] * 2  # 2500 carried over, 2900 of reminder
    assert gate.entered == 2
    await append(peer, user("five words are not many"))
    assert len(await quiet(peer)) == 2


async def test_one_that_is_cancelled_is_tried_again_by_the_next_append(
    peer: Peer, gate: Gate
) -> None:
    """PROTOCOL.md §3, `operation.cancel`."""
    await cross(peer, "a")
    await gate.reached()
    before = await look(peer)
    cancelled = await peer.call("operation.cancel", operation_id=await started(peer))
    assert (cancelled["cancelled"], cancelled["operation"]["status"]) == (True, "cancelled")
    assert (await look(peer))[0]["entries"] == before[0]["entries"]
    assert await quiet(peer) == [("cancelled", "cancelled")]
    gate.open()
    await append(peer, user("x"))
    assert await ended(peer, 2) == [("cancelled", "cancelled"), ("completed", None)]


async def test_a_deleted_session_takes_its_own_with_it(peer: Peer, gate: Gate) -> None:
    """A new session of the same id owes nothing to what is remembered of the old one."""
    for turn in (1, 2, 3):
        await cross(peer, "a")
        await gate.reached(turn)
        operation_id = await started(peer)
        assert (await peer.call("session.delete", session_id="a"))["deleted"] is True
        operation = (await peer.call("operation.get", operation_id=operation_id))["operation"]
        assert operation["status"] == "cancelled"
    gate.open()
    await peer.call("session.create", session_id="a", items=[DEVELOPER])
    assert await quiet(peer) == []
    assert await peer.items("a") == [DEVELOPER]
    await peer.call("session.delete", session_id="a")
    await cross(peer, "a")
    assert await ended(peer, 1) == [("completed", None)]


async def test_a_new_session_of_an_old_id_is_tried_anew(start: Start, clock: Clock) -> None:
    """Generation and setting are the same; what was of no gain is another history."""
    async with start(elapsed_ms=clock) as daemon, daemon.connect() as peer:
        items = [{"role": "system", "content": "0 " * 8_200}, user("a")]
        await peer.call("session.create", session_id="a", items=items, auto_compact=LINE)
        assert await ended(peer, 1) == [("skipped", "no_gain")]
        await peer.call("session.delete", session_id="a")
        clock.ms += 1
        await cross(peer, "a")
        assert await ended(peer, 1) == [("completed", None)]


async def test_one_that_runs_when_the_setting_is_cleared_is_the_last(
    peer: Peer, gate: Gate
) -> None:
    """Clearing begins none and cancels none: that is what `operation.cancel` is for."""
    await cross(peer, "a")
    await gate.reached()
    await peer.call("session.update", session_id="a", auto_compact=None)
    gate.open()
    assert await ended(peer, 1) == [("completed", None)]
    after = await session(peer)
    assert (after["generation"], after["auto_compact"]) == (1, None)
    await append(peer, *[BIG] * 8)
    assert await quiet(peer) == [("completed", None)]


async def test_a_restart_in_the_middle_ends_it_once_and_begins_none(
    start: Start, gate: Gate
) -> None:
    """The setting stays; what follows is decided by the next append."""
    async with start() as daemon, daemon.connect() as peer:
        await cross(peer, "a")
        await gate.reached()
        operation_id = await started(peer)
        await peer.call("session.create", session_id="b", items=[BIG])
        await peer.call("session.compact", session_id="b", wait=False)
    gate.open()
    async with start() as daemon, daemon.connect() as peer:
        (end,) = await quiet(peer)
        assert [end] == await quiet(peer, "b")  # which a client began, and did not wait for
        assert end == ("cancelled", "cancelled")
        operation = await peer.call("operation.get", operation_id=operation_id)
        assert operation["operation"]["status"] == end[0]
        kept = await session(peer)
        assert (kept["auto_compact"]["at_tokens"], kept["busy"]) == (4000, False)
        await append(peer, user("x"))
        assert await ended(peer, 2) == [end, ("completed", None)]


async def test_a_restart_forgets_what_was_of_no_use_and_tries_once_more(
    start: Start, gate: Gate
) -> None:
    """That cannot become a loop: it takes an append, and is remembered again."""
    gate.open()
    items = [{"role": "system", "content": "0 " * 3000}, user("a")]
    for life in (1, 2, 3):
        async with start() as daemon, daemon.connect() as peer:
            if life == 1:
                await peer.call(
                    "session.create",
                    session_id="a",
                    items=items,
                    auto_compact={"at_tokens": 1000},
                )
            else:
                assert len(await quiet(peer)) == life - 1
                await append(peer, user("x"))
            assert await ended(peer, life) == [("skipped", "no_gain")] * life
            await append(peer, user("y"))
            assert len(await quiet(peer)) == life
    assert gate.entered == 3


async def test_a_daemon_that_drains_ends_what_runs_and_begins_none(
    start: Start, gate: Gate
) -> None:
    """PROTOCOL.md §3, `server.shutdown`: until the deadline, then cancelled, as the others."""
    for name, ends_in_time in (("a", True), ("b", False)):
        async with start() as daemon, daemon.connect() as peer:
            await cross(peer, name)
            await gate.reached(1 if ends_in_time else 2)
            deadline_ms = 600_000 if ends_in_time else 10
            await peer.call("server.shutdown", deadline_ms=deadline_ms)
            if ends_in_time:
                gate.open()
            await daemon.exit_code()
        gate.close()
    async with start() as daemon, daemon.connect() as peer:
        assert await quiet(peer, "a") == [("completed", None)]
        (end,) = await quiet(peer, "b")
        assert end == ("cancelled", "cancelled")


async def test_an_append_that_is_under_way_at_the_end_begins_none(start: Start, gate: Gate) -> None:
    """It is durable and acknowledged; the next append in the next life decides."""
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", auto_compact=LINE)
        params: Message = {"session_id": "a", "items": [BIG] * 4}
        await peer.say(
            request("append", "session.append", **params), request("stop", "server.shutdown")
        )
        assert (await peer.result("append"))["session"]["entries"] == 4
        await daemon.exit_code()
    assert gate.entered == 0
    async with start() as daemon, daemon.connect() as peer:
        assert await quiet(peer) == []
        gate.open()
        await append(peer, user("x"))
        assert await ended(peer, 1) == [("completed", None)]


async def test_an_end_at_any_moment_leaves_one_outcome_each(peer: Peer) -> None:
    """DESIGN.md promise 2: appends, cancels, a client's own and clearing, all mixed."""
    await peer.call("session.create", session_id="a", items=[SYSTEM], auto_compact=LINE)
    sent = 0
    for turn in range(60):
        ids = [await peer.ask("session.append", session_id="a", items=[BIG, BIG])]
        sent += 2
        for _ in range(turn % 12):
            await peer.call("protocol.ping")
        match turn % 4:
            case 0:
                ids.append(await peer.ask("session.compact", session_id="a"))
            case 1:
                if (await session(peer))["busy"]:
                    operation_id = await started(peer)
                    ids.append(await peer.ask("operation.cancel", operation_id=operation_id))
            case 2:
                setting = None if turn % 8 == 2 else LINE
                ids.append(await peer.ask("session.update", session_id="a", auto_compact=setting))
            case _:
                pass
        for id in ids:
            answer = await peer.answer(id)
            if "error" in answer:
                reason = answer["error"]["data"]["reason"]
                assert reason in ("compaction_running", "already_committed", "nothing_to_compact")
    await peer.until(lambda got: not got["session"]["busy"], "session.get", session_id="a")
    told = await quiet(peer)
    assert {status for status, _ in told} <= {"completed", "cancelled", "skipped"}
    after = await session(peer)
    assert after["generation"] == sum(status == "completed" for status, _ in told)
    # Every history is the one before, so what was ever appended is in the present one or in one of
    # the archives, in order.
    seen: dict[int, Any] = {}
    for revision in [*after["archived_revisions"], None]:
        for entry in await peer.entries("a", revision=revision):
            assert seen.setdefault(entry["id"], entry) == entry
    own = [entry for entry in seen.values() if "reminder" not in entry]
    assert sum(entry["item"] == BIG for entry in own) == sent
    assert sum("reminder" in entry for entry in seen.values()) == after["generation"]
