"""What a daemon does with too much of anything (PROTOCOL.md §1, "Limits", "Too much at once")."""

import itertools
import json
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import anyio
import pytest
from tests.daemon.conftest import EMPTY, WAIT_S, Daemon, Gate, Peer, notification, request, user

from recapd.protocol.errors import InvalidParams, ItemTooLarge, Overloaded
from recapd.storage.events import event_body

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

FRAME_BYTES = 1 << 20
LONG = "\u0001" * 1000
"""Six times as long in JSON."""


async def test_the_limits_are_announced(start: Start) -> None:
    """PROTOCOL.md §1: by `protocol.initialize`, and each is a setting."""
    async with start(batch_max=5, in_flight_max=6, items_per_append_max=7) as daemon:
        async with daemon.connect() as peer:
            limits = (await peer.call("protocol.initialize"))["limits"]
            assert (await peer.call("server.info"))["limits"] == limits
    assert limits == {
        "frame_bytes": 16 << 20,
        "batch": 5,
        "in_flight": 6,
        "depth": 128,
        "connections": 256,
        "subscriptions": 256,
        "items_per_append": 7,
        "item_bytes": limits["item_bytes"],
    }
    assert 15 << 20 < limits["item_bytes"] < 16 << 20


# Requests in flight.


async def test_one_request_too_many_is_refused_and_the_reader_waits(
    start: Start, gate: Gate
) -> None:
    """PROTOCOL.md §1: `overloaded` with `retry_after_ms`, then back-pressure; nothing is lost."""
    async with start(in_flight_max=2) as daemon, daemon.connect() as peer:
        for name in "abc":
            await peer.call("session.create", session_id=name, items=[user("x")])
        await peer.say(
            *(request(name, "session.compact", session_id=name) for name in "abc"),
            *(request(number, "protocol.ping") for number in range(500)),
        )
        with pytest.raises(Overloaded) as caught:
            await peer.result("c")
        assert caught.value.code == -32001
        assert caught.value.data["retry_after_ms"] > 0
        gate.open()
        for name in "ab":
            assert (await peer.result(name))["status"] == "completed"
        for number in range(500):
            assert "now" in await peer.result(number)
        assert (await peer.call("session.compact", session_id="c"))["status"] == "completed"


async def test_thirty_thousand_requests_at_once_are_all_answered(daemon: Daemon) -> None:
    """DESIGN.md §3: every one answered or refused as `overloaded`, none lost."""
    count = 30_000
    async with daemon.connect() as peer, anyio.create_task_group() as tasks:
        await peer.call("session.create", session_id="a")
        pings = [request(number, "protocol.ping") for number in range(count)]
        tasks.start_soon(peer.send, b"".join(json.dumps(ping).encode() + b"\n" for ping in pings))
        for number in range(count):
            answer = await peer.message()
            assert answer["id"] == number
            assert "now" in answer["result"]


async def test_changes_at_once_are_each_made_or_refused(daemon: Daemon) -> None:
    """PROTOCOL.md §1: an `overloaded` request has done nothing, any other is done once."""
    count = 2_000
    async with daemon.connect() as peer, anyio.create_task_group() as tasks:
        await peer.call("session.create", session_id="a")
        tasks.start_soon(
            peer.say,
            *(
                request(f"n{number}", "session.append", session_id="a", items=[user(str(number))])
                for number in range(count)
            ),
        )
        made: list[str] = []
        for number in range(count):
            answer = await peer.answer(f"n{number}")
            if "result" in answer:
                made.append(str(number))
            else:
                assert answer["error"]["data"]["reason"] == "overloaded"
        assert [item["content"] for item in await peer.items("a")] == made
        assert made


async def test_a_batch_may_be_longer_than_what_may_be_in_flight(start: Start) -> None:
    """PROTOCOL.md §1: the two limits have nothing to do with each other."""
    async with start(in_flight_max=2) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a")
        await peer.say(
            [
                request(number, "session.append", session_id="a", items=[user(str(number))])
                for number in range(100)
            ]
        )
        answers = await peer.message()
        assert len(answers) == 100
        assert all("result" in answer for answer in answers)
        assert await peer.items("a") == [user(str(number)) for number in range(100)]


async def test_notifications_count_while_they_are_under_way(start: Start, gate: Gate) -> None:
    """PROTOCOL.md §1: in flight 64; a flood of notifications is held back like any other."""
    async with start(in_flight_max=2) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        await peer.say(
            notification("session.compact", session_id="a"),
            *(notification("session.append", session_id="a", items=[user("y")]) for _ in "12345"),
        )
        await gate.reached()
        gate.open()
        (last,) = (await peer.call("session.list"))["sessions"]
        assert last["revision"] <= 7


# Connections and subscriptions.


async def test_one_connection_too_many_is_told_so_and_closed(start: Start) -> None:
    """PROTOCOL.md §1, "Limits"; the others go on, and a place that is left is taken."""
    async with start(connections_max=2) as daemon, daemon.connect() as first:
        await first.call("protocol.ping")
        async with daemon.connect() as second:
            await second.call("protocol.ping")
            async with daemon.connect() as third:
                (refused,) = await third.until_closed()
            assert (refused["id"], refused["error"]["code"]) == (None, -32001)
            assert refused["error"]["data"]["retry_after_ms"] > 0
            await first.call("protocol.ping")
            await second.rest()
        async with daemon.connect() as third:
            await third.call("protocol.ping")
            assert (await first.call("server.info"))["connections"] == 2


async def test_one_subscription_too_many_is_refused(start: Start) -> None:
    """PROTOCOL.md §1, "Limits": subscriptions of one connection."""
    async with start(subscriptions_max=2) as daemon, daemon.connect() as peer:
        first = await peer.call("session.subscribe")
        await peer.call("session.subscribe")
        with pytest.raises(Overloaded):
            await peer.call("session.subscribe")
        await peer.call("session.unsubscribe", subscription_id=first["subscription_id"])
        await peer.call("session.subscribe")
        async with daemon.connect() as other:
            await other.call("session.subscribe")


# Items.


async def test_more_items_than_allowed_are_refused_as_a_whole(start: Start) -> None:
    """PROTOCOL.md §1, "Limits": items per append 1000; §3: all or nothing."""
    async with start(items_per_append_max=3) as daemon, daemon.connect() as peer:
        for method in ("session.create", "session.append"):
            with pytest.raises(InvalidParams) as caught:
                await peer.call(method, session_id="a", items=[user("x")] * 4)
            assert caught.value.data["errors"][0]["path"] == "$.items"
            if method == "session.create":
                await peer.call(method, session_id="a", items=[user("x")] * 3)
        await peer.call("session.append", session_id="a", items=[user("x")] * 3)
        assert len(await peer.items("a")) == 6


async def test_the_largest_item_goes_in_and_out_by_every_way(start: Start) -> None:
    """PROTOCOL.md §6, `item_too_large`; an item that was taken can be read (DESIGN.md promise 6).

    Also beside the largest title and labels that a session may have.
    """
    async with start(frame_bytes_max=FRAME_BYTES) as daemon, daemon.connect() as peer:
        limit = (await peer.call("server.info"))["limits"]["item_bytes"]
        labels = {f"{number:0128}": LONG for number in range(14)}
        about = {"title": LONG, "cwd": "\u0001" * 4096, "labels": labels}
        await peer.call("session.create", session_id="a", **about)
        item = user("")
        item["content"] = "x" * (limit - len(json.dumps(item)))
        items = [user("y"), {**item, "role": "users"}]
        with pytest.raises(ItemTooLarge) as caught:
            await peer.call("session.append", session_id="a", items=items)
        assert caught.value.data == {"index": 1, "limit_bytes": limit}
        with pytest.raises(ItemTooLarge):
            await peer.call("session.create", session_id="b", items=items)
        assert await peer.items("a") == []
        await peer.call("session.append", session_id="a", items=[item])
        await peer.call("session.append", session_id="a", items=[user("y")])
        assert (await peer.items("a"))[0] == item
        await peer.call("session.compact", session_id="a")
        assert (await peer.items("a", revision=2))[0] == item
        for form in ("jsonl", "json", "markdown"):
            text = await export(peer, "a", format=form, redact="none", revision=2)
            assert item["content"] in text
        assert (await peer.call("session.list"))["sessions"][0]["labels"] == labels


async def export(peer: Peer, session_id: str, **params: object) -> str:
    text: str = ""
    cursor: str | None = None
    while True:
        chunk = await peer.call("session.export", session_id=session_id, cursor=cursor, **params)
        text += chunk["chunk"]
        if chunk["done"]:
            return text
        cursor = chunk["next_cursor"]


async def test_no_answer_is_longer_than_a_frame_may_be(start: Start) -> None:
    """PROTOCOL.md §1: frame 16 MiB each way; where an answer must be longer, an error says so."""
    async with start(frame_bytes_max=FRAME_BYTES) as daemon, daemon.connect() as peer:
        text = "\u0001" * 60_000  # six times as long in JSON
        session_id = "a"
        await peer.call("session.create", session_id=session_id, items=[user(text)] * 2)
        gets = [request(number, "session.get", session_id=session_id) for number in range(5)]
        await peer.say(gets)
        frame = await peer.frame()
        assert len(frame) < FRAME_BYTES
        by_id = {answer["id"]: answer for answer in json.loads(frame)}
        assert sorted(by_id) == [0, 1, 2, 3, 4]
        reasons = [
            answer["error"]["data"]["reason"] for answer in by_id.values() if "error" in answer
        ]
        assert set(reasons) == {"frame_too_large"}
        assert len(reasons) < 5
        entries = await peer.entries(session_id, max_bytes=1 << 40)
        assert [entry["item"]["content"] for entry in entries] == [text] * 2
        assert json.loads(await export(peer, session_id, format="json", max_bytes=1 << 40))


async def test_a_list_that_does_not_fit_into_a_frame_comes_in_pages(start: Start) -> None:
    """PROTOCOL.md §3, `session.list`: whatever the sessions are called, each is listed."""
    async with start(frame_bytes_max=FRAME_BYTES) as daemon, daemon.connect() as peer:
        labels = {f"{number:0128}": LONG for number in range(14)}
        for number in range(30):
            await peer.call("session.create", session_id=f"s{number}", labels=labels)
        found: list[str] = []
        cursor: str | None = None
        while True:
            page = await peer.call("session.list", cursor=cursor, limit=1000)
            found += [session["session_id"] for session in page["sessions"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert sorted(found) == sorted(f"s{number}" for number in range(30))


async def test_events_that_do_not_fit_into_a_frame_come_in_pages(start: Start) -> None:
    """PROTOCOL.md §3, `session.events`: its `next_seq` goes on where a page ends."""
    count = 6_000
    async with start(frame_bytes_max=FRAME_BYTES) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a")
        for _ in range(count // 50):
            await peer.say([notification("session.append", session_id="a", items=[EMPTY])] * 50)
        await peer.call("session.get", session_id="a", view="info")
        seen: list[int] = []
        since = 0
        while True:
            page = await peer.call("session.events", session_id="a", since=since, limit=100_000)
            if not page["events"]:
                break
            seen += [event["seq"] for event in page["events"]]
            since = page["next_seq"]
        assert seen == list(range(1, count + 2))


async def test_an_event_that_fits_into_no_frame_ends_its_connection_only(
    start: Start, monkeypatch: pytest.MonkeyPatch, incidents: list[str]
) -> None:
    """DESIGN.md promise 4: it is not left out; the connection ends, and nothing else does."""

    def long(*arguments: Any) -> bytes:
        body = event_body(*arguments)
        return body[:-1] + b',"padding":"%b"}' % (b"x" * FRAME_BYTES)

    async with start(frame_bytes_max=FRAME_BYTES) as daemon:
        async with daemon.connect() as peer, daemon.connect() as other:
            await peer.call("session.create", session_id="a")
            await other.call("session.subscribe", session_id="a", since="start")
            await other.notice("session.created")
            incidents.append("told in the log")
            with monkeypatch.context() as patch:
                patch.setattr("recapd.storage.ledger.event_body", long)
                await peer.call("session.update", session_id="a", title="t")
            assert await other.until_closed() == []
            await peer.call("session.append", session_id="a", items=[user("x")])
            assert await peer.items("a") == [user("x")]


# Clients that do not read.


@pytest.mark.promise("N2")
async def test_a_client_that_does_not_read_is_dropped_and_disturbs_nobody(start: Start) -> None:
    """PROMISES.md N2; PROTOCOL.md §1, "Slow subscriber"."""
    async with start(send_timeout_s=1) as daemon, AsyncExitStack() as stack:
        writer, reader, stalled = [
            await stack.enter_async_context(daemon.connect()) for _ in range(3)
        ]
        await writer.call("session.create", session_id="a")
        await stalled.call("session.subscribe", session_id="a")
        await reader.call("session.subscribe", session_id="a")
        assert (await writer.call("server.info"))["connections"] == 3
        seen = 1
        with anyio.fail_after(40):
            while (await writer.call("server.info"))["connections"] == 3:
                await writer.say(
                    [notification("session.append", session_id="a", items=[EMPTY])] * 100
                )
                for _ in range(100):
                    notice = await reader.notice()
                    assert notice["params"]["seq"] == seen + 1
                    seen += 1
        # What it had not read is what the kernel had taken; then comes the end.
        sequences = [notice["params"]["seq"] for notice in await stalled.until_closed_abruptly()]
        assert sequences == list(range(2, 2 + len(sequences)))
        async with daemon.connect() as again:
            since = sequences[-1]
            answer = await again.call("session.subscribe", session_id="a", since=since)
            assert answer["resume"] == "exact"
            assert (await again.notice())["params"]["seq"] == since + 1


@pytest.mark.promise("N1")
@pytest.mark.parametrize("start_of_frame", [b'{"jsonrpc":', b"Content-Length: 100\r\n\r\n{"])
async def test_a_frame_that_does_not_end_ends_its_connection_and_an_idle_one_stays(
    start: Start, start_of_frame: bytes
) -> None:
    """However it trickles in; who says nothing may be a subscriber."""
    async with start(frame_timeout_s=1) as daemon, AsyncExitStack() as stack:
        silent, trickling, idle, other = [
            await stack.enter_async_context(daemon.connect()) for _ in range(4)
        ]
        await idle.call("session.subscribe")
        await silent.send(start_of_frame)
        await trickling.send(start_of_frame)

        async def trickle() -> None:
            while True:
                await trickling.send(b" ")
                await other.call("protocol.ping")

        with pytest.raises(anyio.BrokenResourceError), anyio.fail_after(WAIT_S):
            await trickle()
        assert await silent.until_closed() == []
        await other.call("session.create", session_id="a")
        assert (await idle.notice())["method"] == "session.created"
        assert (await other.call("server.info"))["connections"] == 2


@pytest.mark.promise("N2", "J2")
async def test_what_waits_for_a_client_that_does_not_read_is_bounded(start: Start) -> None:
    """PROMISES.md J2, N2: reads wait until the client has taken what it asked for before."""
    async with start(send_timeout_s=60) as daemon, daemon.connect() as other:
        await other.call("session.create", session_id="a")
        for _ in range(10):
            await other.call("session.append", session_id="a", items=[user("x" * 300_000)])
        async with daemon.connect() as stalled:
            tracemalloc.start()
            try:
                await stalled.say(
                    *(
                        request(number, "session.get", session_id="a", max_bytes=3_000_000)
                        for number in range(60)
                    )
                )
                for _ in range(100):
                    await other.call("session.list")
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert peak < 40_000_000
            for number in range(60):  # nothing is lost
                assert len((await stalled.result(number))["entries"]) == 9


async def test_a_client_that_reads_slowly_gets_a_large_answer_whole(start: Start) -> None:
    """BUGLOG B52: a read of 20 MB taken a piece at a time delays nobody else."""
    async with start() as daemon, daemon.connect() as other, daemon.connect() as slow:
        await other.call("session.create", session_id="a")
        item = user("x" * 1_000_000)
        for _ in range(14):
            await other.call("session.append", session_id="a", items=[item])
        await slow.say(request("big", "session.get", session_id="a", max_bytes=15_000_000))
        received = bytearray()
        with anyio.fail_after(WAIT_S):
            for turn in itertools.count():
                received += await slow.stream.receive(65_536)
                if turn % 20 == 0:
                    await other.call("protocol.ping")
                if received.endswith(b"\n"):
                    break
        entries: list[Any] = json.loads(received)["result"]["entries"]
        assert [entry["item"] for entry in entries] == [item] * 14
