"""Events: told once each, in order, and only when they are durable (PROTOCOL.md §3, §4)."""

import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest
from tests.daemon.conftest import (
    EMPTY,
    WAIT_S,
    Daemon,
    Message,
    Peer,
    notification,
    request,
    user,
)

from recapd.protocol.errors import NotFound
from recapd.storage.sqlite import SqliteStore
from recapd.storage.store import Session

Start = Callable[..., AbstractAsyncContextManager[Daemon]]


async def live(peer: Peer, method: str, **params: object) -> list[Message]:
    """The notifications that a change brings a subscriber: all that come before the next answer."""
    await peer.call(method, **params)
    await peer.call("protocol.ping")
    notices = [peer.notices.popleft() for _ in range(len(peer.notices))]
    return notices


# What is told.


async def test_each_change_is_told_with_its_revision_and_number(peer: Peer) -> None:
    """PROTOCOL.md §4: `seq` is per session and without gaps; every member of every event."""
    await peer.call("session.create", session_id="a")
    answer = await peer.call("session.subscribe", session_id="a", since="start")
    assert (answer["from_seq"], answer["resume"]) == (0, "exact")
    await peer.call("session.append", session_id="a", items=[user("x"), user("y")])
    await peer.call("session.append", session_id="a", items=[user("z")], operation_id="op-1")
    await peer.call("session.update", session_id="a", title="t")
    compact = await peer.call("session.compact", session_id="a", operation_id="op-2")
    await peer.call("session.delete", session_id="a")
    told: list[Message] = []
    while not told or told[-1]["method"] != "session.deleted":
        notice = await peer.notice()
        if notice["method"] != "compaction.progress":
            told.append(notice)
    common = {"subscription_id": answer["subscription_id"], "session_id": "a"}
    expected: list[tuple[str, Message]] = [
        ("session.created", {"revision": 0, "generation": 0}),
        (
            "history.appended",
            {"revision": 1, "generation": 0, "first_entry_id": 1, "last_entry_id": 2},
        ),
        (
            "history.appended",
            {
                "revision": 2,
                "generation": 0,
                "operation_id": "op-1",
                "first_entry_id": 3,
                "last_entry_id": 3,
            },
        ),
        ("session.updated", {"revision": 2, "generation": 0}),
        ("compaction.started", {"revision": 2, "generation": 0, "operation_id": "op-2"}),
        (
            "history.replaced",
            {
                "revision": 3,
                "generation": 1,
                "operation_id": "op-2",
                "kind": "compaction",
                "from_generation": 0,
                "to_generation": 1,
                "archived_revision": 2,
                "entries_before": 3,
                "entries_after": 1,
                "tokens_before": compact["tokens_before"],
                "tokens_after": compact["tokens_after"],
                "retained_entry_ids": [],
                "reminder_entry_id": 4,
                "carried_over": 0,
            },
        ),
        (
            "compaction.finished",
            {
                "revision": 3,
                "generation": 1,
                "operation_id": "op-2",
                "status": "completed",
                "quality": "offline",
            },
        ),
        ("session.deleted", {"revision": 3, "generation": 1}),
    ]
    assert [notice["method"] for notice in told] == [method for method, _ in expected]
    for seq, (notice, (_, members)) in enumerate(zip(told, expected, strict=True), start=1):
        assert notice["params"] == {
            **common,
            "seq": seq,
            "prev_seq": seq - 1,
            "at": notice["params"]["at"],
            **members,
        }


async def test_progress_is_told_to_those_who_are_there_and_is_in_no_log(peer: Peer) -> None:
    """PROTOCOL.md §4: not durable; at most ten a second."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    answer = await peer.call("session.subscribe", session_id="a")
    compacted: Message = {}
    progress: list[Message] = []
    with anyio.fail_after(WAIT_S):
        while not progress:  # it is told to a subscription that has caught up, which takes a moment
            compacted = await peer.call("session.compact", session_id="a", force=True)
            await peer.notice("compaction.finished")
            progress = [one for one in peer.notices if one["method"] == "compaction.progress"]
    assert len(progress) < 10
    for notice in progress:
        assert notice["params"] == {
            "subscription_id": answer["subscription_id"],
            "session_id": "a",
            "operation_id": compacted["operation_id"],
            "stage": notice["params"]["stage"],
            "done": notice["params"]["done"],
            "total": notice["params"]["total"],
        }
    events = (await peer.call("session.events", session_id="a", since=0))["events"]
    assert "compaction.progress" not in [event["method"] for event in events]


async def test_nothing_is_told_of_what_was_refused(peer: Peer) -> None:
    """DESIGN.md promise 4: told only what is true."""
    await peer.call("session.create", session_id="a")
    await peer.call("session.subscribe", since="now")
    refused: list[tuple[str, Message]] = [
        ("session.create", {"session_id": "a"}),
        ("session.append", {"session_id": "a", "items": [3]}),
        ("session.append", {"session_id": "a", "items": [EMPTY], "expected_revision": 7}),
        ("session.append", {"session_id": "b", "items": [EMPTY]}),
        ("session.compact", {"session_id": "a", "expected_generation": 7}),
        ("session.delete", {"session_id": "b"}),
    ]
    for method, params in refused:
        await peer.answer(await peer.ask(method, **params))
    for method, params in (("session.get", {"session_id": "a"}), ("session.list", {})):
        await peer.call(method, **params)
    await peer.call("session.update", session_id="a", title="t")
    assert (await peer.notice())["method"] == "session.updated"
    assert not peer.notices


async def test_an_event_is_told_before_the_change_is_seen_by_nobody(
    daemon: Daemon, peer: Peer
) -> None:
    """PROTOCOL.md §4: a notification is sent only after its transaction; reading finds it then."""
    await peer.call("session.create", session_id="a")
    async with daemon.connect() as other:
        await other.call("session.subscribe", session_id="a")
        for number in range(1, 50):
            id = await peer.ask("session.append", session_id="a", items=[user("x")])
            notice = await other.notice("history.appended")
            read = await other.call("session.get", session_id="a", view="info")
            assert read["session"]["revision"] >= notice["params"]["revision"] == number
            await peer.result(id)


# Since when.


async def test_a_subscription_begins_now_from_the_start_or_behind_an_event(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.subscribe`: first the answer, then the gap, then live events."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.call("session.update", session_id="a", title="t")
    for since, from_seq, resume in (
        ("start", 0, "exact"),
        (0, 0, "exact"),
        (2, 2, "exact"),
        (3, 3, "exact"),
        ("now", 3, "exact"),
        (4, 3, "reset"),
        (2**53, 3, "reset"),
    ):
        answer = await peer.call("session.subscribe", session_id="a", since=since)
        assert (answer["from_seq"], answer["resume"]) == (from_seq, resume)
        for seq in range(from_seq + 1, 4):
            assert (await peer.notice())["params"]["seq"] == seq
        await peer.call("session.unsubscribe", subscription_id=answer["subscription_id"])
        assert not peer.notices
    with pytest.raises(NotFound):
        await peer.call("session.subscribe", session_id="nobody")


async def test_the_answer_comes_before_the_first_event(peer: Peer) -> None:
    """PROTOCOL.md §3: also in a batch, and with changes right behind."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.say(
        request("s", "session.subscribe", session_id="a", since="start"),
        request("a", "session.append", session_id="a", items=[user("y")]),
    )
    first = await peer.message()
    assert first["id"] == "s"
    await peer.answer("a")
    for seq in (1, 2, 3):
        assert (await peer.notice())["params"]["seq"] == seq
    await peer.say(
        [
            request("s", "session.subscribe", session_id="a", since="start"),
            request("w", "session.events", session_id="a", since=3, wait_ms=100),
        ]
    )
    first = await peer.message()
    assert isinstance(first, list)
    for seq in (1, 2, 3):
        assert (await peer.notice())["params"]["seq"] == seq


async def test_a_subscription_to_all_sessions_has_each_events_once(
    daemon: Daemon, peer: Peer
) -> None:
    """PROTOCOL.md §3: without a session; of every session, also of new and deleted ones."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    async with daemon.connect() as late:
        await peer.call("session.subscribe")
        await late.call("session.subscribe", since="start")
        for name in "bc":
            await peer.call("session.create", session_id=name, items=[user("x")])
        await peer.call("session.compact", session_id="b")
        await peer.call("session.delete", session_id="a")
        await peer.call("session.create", session_id="a")
        expected = {
            "b": ["created", "appended", "started", "replaced", "finished"],
            "c": ["created", "appended"],
            "a": ["deleted", "created"],
        }
        for subscriber, before in ((peer, []), (late, ["created", "appended"])):
            wanted = {**expected, "a": [*before, *expected["a"]]}
            seen: dict[str, list[str]] = {name: [] for name in wanted}
            seqs: dict[str, list[int]] = {name: [] for name in wanted}
            while seen != wanted:
                notice = await subscriber.notice()
                if notice["method"] != "compaction.progress":
                    name = notice["params"]["session_id"]
                    seen[name].append(notice["method"].partition(".")[2])
                    seqs[name].append(notice["params"]["seq"])
            assert all(found == sorted(set(found)) for found in seqs.values())
            await subscriber.call("protocol.ping")
            assert not subscriber.notices


async def test_what_is_no_event_of_the_wanted_kinds_is_not_sent(peer: Peer) -> None:
    """PROTOCOL.md §3, `events`."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.call(
        "session.subscribe",
        session_id="a",
        since="start",
        events=["history.replaced", "session.updated"],
    )
    await peer.call("session.subscribe", session_id="a", since="start", events=[])
    await peer.call("session.compact", session_id="a")
    await peer.call("session.append", session_id="a", items=[user("y")])
    await peer.call("session.update", session_id="a", title="t")
    assert (await peer.notice())["method"] == "history.replaced"
    assert (await peer.notice())["method"] == "session.updated"
    await peer.call("protocol.ping")
    assert not peer.notices


async def test_several_subscriptions_of_one_connection_are_told_each(peer: Peer) -> None:
    """PROTOCOL.md §4: `subscription_id` says for which."""
    await peer.call("session.create", session_id="a")
    ids = {
        (await peer.call("session.subscribe", session_id="a"))["subscription_id"],
        (await peer.call("session.subscribe"))["subscription_id"],
    }
    await peer.call("session.append", session_id="a", items=[user("x")])
    told = [await peer.notice(), await peer.notice()]
    assert {notice["params"]["subscription_id"] for notice in told} == ids


async def test_after_unsubscribing_nothing_more_is_told(daemon: Daemon, peer: Peer) -> None:
    """PROTOCOL.md §3, `session.unsubscribe`: of this connection only; twice is no error."""
    await peer.call("session.create", session_id="a")
    answer = await peer.call("session.subscribe", session_id="a")
    params = {"subscription_id": answer["subscription_id"]}
    async with daemon.connect() as other:
        assert await other.call("session.unsubscribe", **params) == {"unsubscribed": False}
    await peer.call("session.append", session_id="a", items=[user("x")])
    await peer.notice("history.appended")
    assert await peer.call("session.unsubscribe", **params) == {"unsubscribed": True}
    assert await peer.call("session.unsubscribe", **params) == {"unsubscribed": False}
    await peer.call("session.append", session_id="a", items=[user("x")])
    await peer.call("protocol.ping")
    assert not peer.notices


# Resuming.


async def test_a_subscriber_that_comes_back_misses_nothing(start: Start) -> None:
    """DESIGN.md promise 4: with its last `seq`, each event once, also over a restart."""
    seen: list[int] = []
    for turn in range(4):
        async with start() as daemon, daemon.connect() as writer:
            if turn == 0:
                await writer.call("session.create", session_id="a")
            await writer.call("session.append", session_id="a", items=[user("x")])
            for _ in range(3):
                async with daemon.connect() as peer:
                    since = seen[-1] if seen else "start"
                    answer = await peer.call("session.subscribe", session_id="a", since=since)
                    assert answer["resume"] == "exact"
                    await writer.call("session.append", session_id="a", items=[user("x")])
                    await writer.call("session.update", session_id="a", title="t")
                    last = (await writer.call("session.events", session_id="a", since=0))[
                        "next_seq"
                    ]
                    while not seen or seen[-1] < last - turn % 2:
                        notice = await peer.notice()
                        seen.append(notice["params"]["seq"])
                        assert notice["params"]["prev_seq"] == seen[-1] - 1
    assert seen == list(range(1, len(seen) + 1))


async def test_subscribing_during_changes_leaves_no_gap(daemon: Daemon) -> None:
    """DESIGN.md promise 4: the hand-over from the log to live events, many times."""

    async def write() -> None:
        async with daemon.connect() as writer:
            for _ in range(40):
                await writer.say(
                    [
                        notification("session.append", session_id="a", items=[EMPTY])
                        for _ in "1234567"
                    ]
                )
                await writer.call("session.update", session_id="a", title="t")

    async def follow(since: str | int, session_id: str | None) -> None:
        async with daemon.connect() as peer:
            await peer.call("session.subscribe", session_id=session_id, since=since)
            seq = 0 if since == "start" else None
            while seq != 1 + 40 * 8:
                notice = await peer.notice()
                assert seq in (None, notice["params"]["prev_seq"])
                seq = notice["params"]["seq"]

    async with daemon.connect() as peer:
        await peer.call("session.create", session_id="a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            for number in range(12):
                tasks.start_soon(follow, ("start", "now")[number % 2], ("a", None)[number // 2 % 2])
                await peer.call("session.list")


async def test_a_subscriber_that_fell_behind_catches_up_from_the_log(daemon: Daemon) -> None:
    """PROTOCOL.md §1, "Slow subscriber": never loses an event and never slows others."""
    async with daemon.connect() as writer, daemon.connect() as slow:
        await writer.call("session.create", session_id="a")
        await slow.call("session.subscribe", session_id="a")
        await slow.call("session.subscribe", since="start")
        for _ in range(90):
            await writer.say(
                [request(n, "session.append", session_id="a", items=[EMPTY]) for n in range(120)]
            )
            assert all("result" in answer for answer in await writer.message())
        total = 1 + 90 * 120
        seen: dict[str, list[int]] = {}
        while len(seen) < 2 or any(len(found) < total - 1 for found in seen.values()):
            params = (await slow.notice())["params"]
            seen.setdefault(params["subscription_id"], []).append(params["seq"])
        await slow.call("protocol.ping")
        for notice in slow.notices:
            seen[notice["params"]["subscription_id"]].append(notice["params"]["seq"])
        slow.notices.clear()
        assert sorted(seen.values(), key=len) == [
            list(range(2, total + 1)),
            list(range(1, total + 1)),
        ]
        await writer.call("session.append", session_id="a", items=[user("x")])
        assert (await slow.notice())["params"]["seq"] == total + 1


async def test_an_event_that_is_read_from_the_log_before_it_is_told_comes_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN.md promise 4: between COMMIT and the telling a deletion removes files for a while."""
    may_remove = threading.Event()
    unlink = SqliteStore._unlink  # pyright: ignore[reportPrivateUsage]  # the place to be slow

    def slow(self: SqliteStore, session_id: str, revision: int) -> None:
        assert may_remove.wait(10)
        unlink(self, session_id, revision)

    monkeypatch.setattr(SqliteStore, "_unlink", slow)
    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await peer.call("session.create", session_id="a", items=[user("x")])
        await peer.call("session.compact", session_id="a")
        deletion = await peer.ask("session.delete", session_id="a")
        try:
            await other.until(lambda listed: listed["sessions"] == [], "session.list")
            await other.call("session.subscribe", since="start")
            await other.notice("session.deleted")
            for _ in range(10):
                await other.call("session.list")
        finally:
            may_remove.set()
        assert (await peer.result(deletion))["deleted"] is True
        await other.call("session.create", session_id="b")
        assert [notice["method"] for notice in (await other.notice(),)] == ["session.created"]


# session.events


async def test_events_can_be_pulled_in_pages(peer: Peer) -> None:
    """PROTOCOL.md §3, `session.events`: as notifications, with `method` beside."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.call("session.compact", session_id="a", operation_id="op")
    await peer.call("session.subscribe", session_id="a", since="start")
    told = [await peer.notice() for _ in range(5)]
    found: list[Any] = []
    since = 0
    while True:
        page = await peer.call("session.events", session_id="a", since=since, limit=2)
        assert page["resume"] == "exact"
        if not page["events"]:
            assert page["next_seq"] == since == 5
            break
        assert len(page["events"]) <= 2
        found += page["events"]
        since = page["next_seq"]
    for event, notice in zip(found, told, strict=True):
        del notice["params"]["subscription_id"]
        assert event == {"method": notice["method"], **notice["params"]}
    ahead = await peer.call("session.events", session_id="a", since=6)
    assert ahead == {"events": [], "next_seq": 5, "resume": "reset"}
    with pytest.raises(NotFound):
        await peer.call("session.events", session_id="nobody", since=0)


async def test_a_pull_waits_for_the_next_event(daemon: Daemon, peer: Peer) -> None:
    """PROTOCOL.md §3, `wait_ms`: until it happens or the time is over; it holds up nothing."""
    await peer.call("session.create", session_id="a")
    over = await peer.call("session.events", session_id="a", since=1, wait_ms=20)
    assert over == {"events": [], "next_seq": 1, "resume": "exact"}
    waits = [
        await peer.ask("session.events", session_id="a", since=1, wait_ms=600_000) for _ in range(3)
    ]
    async with daemon.connect() as other:
        other_wait = await other.ask("session.events", session_id="a", since=1, wait_ms=600_000)
        await other.call("protocol.ping")
        await peer.call("session.append", session_id="a", items=[user("x")])
        for wait in waits:
            page = await peer.result(wait)
            assert [event["method"] for event in page["events"]] == ["history.appended"]
            assert page["next_seq"] == 2
        assert (await other.result(other_wait))["next_seq"] == 2


async def test_a_pull_that_waits_can_be_cancelled_and_ends_with_its_session(
    daemon: Daemon, peer: Peer
) -> None:
    """PROTOCOL.md §3, `$/cancelRequest`; a deletion is an event as well."""
    await peer.call("session.create", session_id="a")
    wait = await peer.ask("session.events", session_id="a", since=1, wait_ms=600_000)
    await peer.say(notification("$/cancelRequest", id=wait))
    assert (await peer.answer(wait))["error"]["data"]["reason"] == "request_cancelled"
    wait = await peer.ask("session.events", session_id="a", since=1, wait_ms=600_000)
    async with daemon.connect() as other:
        await other.call("session.delete", session_id="a")
    page = await peer.result(wait)
    assert [event["method"] for event in page["events"]] == ["session.deleted"]
    again = await peer.call("session.events", session_id="a", since=0)
    assert [event["method"] for event in again["events"]] == ["session.deleted"]


async def test_a_session_that_is_deleted_while_it_is_pulled_from_tells_its_end(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL.md §4: the deletion is in the log, so it is no `not_found`."""
    session = SqliteStore.session
    reached, may_go_on = anyio.Event(), anyio.Event()

    async def slow(self: SqliteStore, session_id: str) -> Session:
        reached.set()
        await may_go_on.wait()
        return await session(self, session_id)

    async with start() as daemon, daemon.connect() as peer, daemon.connect() as other:
        await peer.call("session.create", session_id="a")
        with monkeypatch.context() as patch:
            patch.setattr(SqliteStore, "session", slow)
            pull = await peer.ask("session.events", session_id="a", since=1, wait_ms=600_000)
            try:
                with anyio.fail_after(WAIT_S):
                    await reached.wait()
                await other.call("session.delete", session_id="a")
            finally:
                may_go_on.set()
            page = await peer.result(pull)
        assert [event["method"] for event in page["events"]] == ["session.deleted"]
