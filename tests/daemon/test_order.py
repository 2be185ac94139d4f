"""In what order things happen, and what a client that leaves has done (PROTOCOL.md §1, "Order")."""

import asyncio
import gc
import itertools
import random
import socket
import struct
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest
from anyio.abc import SocketAttribute
from tests.daemon.conftest import EMPTY, Daemon, Gate, Message, Peer, notification, request, user

from recapd.protocol.errors import Conflict, NotFound


async def test_a_read_sees_exactly_what_the_connection_sent_before_it(peer: Peer) -> None:
    """PROTOCOL.md §1: the same connection and session, in arrival order."""
    await peer.call("session.create", session_id="a")
    messages: list[Message] = []
    for number in range(30):
        messages += [
            request(f"append {number}", "session.append", session_id="a", items=[user("x")]),
            request(f"get {number}", "session.get", session_id="a"),
        ]
    await peer.say(*messages)
    for number in range(30):
        read = await peer.result(f"get {number}")
        assert (len(read["entries"]), read["revision"]) == (number + 1, number + 1)
        assert (await peer.result(f"append {number}"))["session"]["revision"] == number + 1


async def test_every_kind_of_change_keeps_its_place(peer: Peer) -> None:
    """PROTOCOL.md §1, for methods that take long and such that do not."""
    script: list[tuple[str, Message]] = [
        ("session.create", {"items": [user("1")]}),
        ("session.append", {"items": [user("2")], "expected_revision": 1}),
        ("session.compact", {"expected_revision": 2, "wait": False, "operation_id": "first"}),
        ("session.append", {"items": [user("3")]}),
        ("session.update", {"title": "t", "expected_generation": 0}),
        ("session.get", {}),
        ("session.delete", {}),
        ("session.append", {"items": [user("4")]}),
        ("session.get", {}),
        ("session.create", {"items": [user("5")]}),
        ("session.delete", {}),
        ("session.create", {"title": "last"}),
        ("session.subscribe", {"since": "start"}),
        ("session.append", {"items": [user("6")]}),
        ("session.get", {}),
    ]
    for _ in range(5):
        await peer.say(
            *(
                request(f"step {step}", method, session_id="a", **params)
                for step, (method, params) in enumerate(script)
            )
        )
        answers = [await peer.answer(f"step {step}") for step in range(len(script))]
        failed = {
            step: answer["error"]["data"]["reason"]
            for step, answer in enumerate(answers)
            if "error" in answer
        }
        assert failed == {7: "not_found", 8: "not_found"}
        assert answers[10]["result"]["deleted"] is True
        last = answers[14]["result"]
        assert [entry["item"] for entry in last["entries"]] == [user("6")]
        assert last["session"]["title"] == "last"
        await peer.call("session.delete", session_id="a")
        peer.notices.clear()
        await peer.call("operation.get", operation_id="first", wait_ms=5000)
        script[2][1]["operation_id"] += "x"


async def test_a_read_waits_for_its_own_connection_only(
    daemon: Daemon, peer: Peer, gate: Gate
) -> None:
    """DESIGN.md §1, "The actor"; PROTOCOL.md §1: a waiting compaction holds up nothing."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    compact = await peer.ask("session.compact", session_id="a")
    await gate.reached()
    async with daemon.connect() as other:
        for one in (peer, other):
            assert (await one.call("session.get", session_id="a"))["session"]["busy"] is True
            await one.call("session.append", session_id="a", items=[user("y")])
            assert (await one.call("session.export", session_id="a"))["done"] is True
            await one.call("session.update", session_id="a", title="t")
            assert len((await one.call("session.list"))["sessions"]) == 1
    gate.open()
    assert (await peer.result(compact))["carried_over"] == 2


async def test_different_sessions_do_not_wait_for_each_other(peer: Peer, gate: Gate) -> None:
    """PROTOCOL.md §1, "Order": concurrent, also on one connection; answers in any order."""
    for name in "ab":
        await peer.call("session.create", session_id=name, items=[user("x")])
    await peer.say(
        request("slow", "session.compact", session_id="a"),
        request("wait", "session.events", session_id="a", since=99, wait_ms=1),
        request("long", "session.events", session_id="b", since=2, wait_ms=600_000),
        request("read", "session.get", session_id="b"),
    )
    assert len((await peer.result("read"))["entries"]) == 1
    assert (await peer.result("wait"))["resume"] == "reset"
    gate.open()
    assert (await peer.result("slow"))["status"] == "completed"
    await peer.call("session.append", session_id="b", items=[user("y")])
    assert len((await peer.result("long"))["events"]) == 1


async def test_two_writers_lose_nothing_and_keep_their_own_order(daemon: Daemon) -> None:
    """BUGLOG B34: 500 items each to one session at once."""

    async def write(name: str) -> None:
        async with daemon.connect() as peer:
            for start in range(0, 500, 50):
                await peer.say(
                    [
                        request(
                            number,
                            "session.append",
                            session_id="a",
                            items=[user(f"{name} {number}")],
                        )
                        for number in range(start, start + 50)
                    ]
                )
                assert all("result" in answer for answer in await peer.message())

    async with daemon.connect() as peer:
        await peer.call("session.create", session_id="a")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write, "one")
            tasks.start_soon(write, "two")
        entries = await peer.entries("a")
    assert [entry["id"] for entry in entries] == list(range(1, 1001))
    texts: list[str] = [entry["item"]["content"] for entry in entries]
    for name in ("one", "two"):
        own = [text for text in texts if text.startswith(name)]
        assert own == [f"{name} {number}" for number in range(500)]


async def test_fifty_first_requests_at_once_are_all_served(daemon: Daemon) -> None:
    """BUGLOG B61: a fresh folder, everybody comes in the first moment."""

    async def begin(number: int) -> None:
        async with daemon.connect() as peer:
            await peer.call("session.create", session_id=f"s{number}", items=[user("x")])
            assert await peer.items(f"s{number}") == [user("x")]

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(begin, number)
    async with daemon.connect() as peer:
        assert len((await peer.call("session.list"))["sessions"]) == 50


async def test_of_many_who_expect_the_same_revision_one_wins(daemon: Daemon) -> None:
    """PROTOCOL.md §2, "Expect": a mismatch is `conflict`, nothing done."""
    outcomes: list[str] = []

    async def append(number: int) -> None:
        async with daemon.connect() as peer:
            try:
                await peer.call(
                    "session.append",
                    session_id="a",
                    items=[user(str(number))],
                    expected_revision=0,
                )
                outcomes.append("won")
            except Conflict as conflict:
                outcomes.append(f"lost to revision {conflict.data['revision']}")

    async with daemon.connect() as peer:
        await peer.call("session.create", session_id="a")
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(append, number)
        assert sorted(outcomes) == ["lost to revision 1"] * 19 + ["won"]
        assert len(await peer.items("a")) == 1


# Clients that leave.


async def test_a_client_that_only_listens_any_more_gets_its_answers(peer: Peer, gate: Gate) -> None:
    """shutdown(2) with SHUT_WR: it sends no more, and what it sent before is answered."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.say(
        request("compact", "session.compact", session_id="a"),
        request("append", "session.append", session_id="a", items=[user("y")]),
        request("get", "session.get", session_id="a"),
        notification("session.append", session_id="a", items=[user("z")]),
    )
    await peer.stream.send_eof()
    await gate.reached()
    assert "result" in await peer.answer("append")
    assert len((await peer.result("get"))["entries"]) == 2
    gate.open()
    assert (await peer.result("compact"))["carried_over"] == 2
    assert await peer.until_closed() == []


def reset(peer: Peer) -> None:
    """Let the close lose everything that is unsent and unread."""
    raw = peer.stream.extra(SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("abruptly", [False, True])
async def test_clients_that_leave_at_once_harm_nobody(daemon: Daemon, abruptly: bool) -> None:
    """BUGLOG B58: with changes, reads and a compaction under way, behind each other, 200 times."""
    async with daemon.connect() as other:
        await other.call("session.create", session_id="a", items=[user("x" * 10_000)])
        for turn in range(200):
            append = request("append", "session.append", session_id="a", items=[user("x")])
            messages = [
                append,
                request("get", "session.get", session_id="a"),
                {**append, "id": "again"},
                request("compact", "session.compact", session_id="a"),
                request("subscribe", "session.subscribe", session_id="a", since="start"),
                request("delete", "session.delete", session_id="nobody"),
                request("wait", "session.events", session_id="a", since=10**6, wait_ms=600_000),
            ]
            async with daemon.connect() as peer:
                await peer.say(*messages[: 1 + turn % len(messages)])
                if turn % 3 == 0:
                    await peer.stream.receive(100)
                if abruptly:
                    reset(peer)
        await other.until(lambda info: info["connections"] == 1, "server.info")
        await other.until(lambda h: h["queues"]["running_compactions"] == 0, "server.health")
        read = await other.call("session.get", session_id="a", max_bytes=15_000_000)
        ids = [entry["id"] for entry in read["entries"]]
        assert ids == sorted(set(ids))
        events = await events_of(other, "a")
        assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
        started = [e["operation_id"] for e in events if e["method"] == "compaction.started"]
        finished = [e["operation_id"] for e in events if e["method"] == "compaction.finished"]
        assert started == finished
        assert (await other.call("server.info"))["sessions_loaded"] == 0


async def events_of(peer: Peer, session_id: str) -> list[Any]:
    events: list[Any] = []
    since = 0
    while True:
        page = await peer.call("session.events", session_id=session_id, since=since)
        if not page["events"]:
            return events
        events += page["events"]
        since = page["next_seq"]


async def test_an_append_is_made_whole_or_not_at_all_when_its_client_leaves(
    daemon: Daemon,
) -> None:
    """BUGLOG B62: 1,000 items in one call, the connection cut meanwhile, others at work."""
    random_ = random.Random(62)
    items = [user(f"{number}") for number in range(1000)]
    async with daemon.connect() as other:
        await other.call("session.create", session_id="a")
        await other.call("session.create", session_id="b")
        whole = b'{"jsonrpc":"2.0","method":"session.append","params":{"session_id":"a","items":['
        whole += b",".join(b'{"role":"user","content":"%d"}' % n for n in range(1000)) + b"]}}\n"
        for turn in range(60):
            async with daemon.connect() as peer:
                cut = len(whole) if turn % 2 else random_.randrange(len(whole))
                await peer.send(whole[:cut])
                reset(peer)
            await other.call("session.append", session_id="b", items=[user("x")])
        await other.until(lambda info: info["connections"] == 1, "server.info")
        found = await other.items("a", limit=100_000)
        assert len(found) % 1000 == 0
        for start in range(0, len(found), 1000):
            assert found[start : start + 1000] == items
        assert len(await other.items("b")) == 60


async def test_many_connections_leave_nothing_behind(daemon: Daemon, peer: Peer) -> None:
    """PROMISES.md N3: connects and disconnects at random points leak no task and no place."""
    await peer.call("session.create", session_id="a")
    before = len(anyio.get_running_tasks())
    for turn in range(300):
        async with daemon.connect() as other:
            match turn % 4:
                case 1:
                    await other.send(b'{"jsonrpc"')
                case 2:
                    await other.call("session.subscribe", session_id="a")
                case 3:
                    await other.ask("session.get", session_id="a")
                case _:
                    pass
    await peer.until(lambda info: info["connections"] == 1, "server.info")
    assert len(anyio.get_running_tasks()) == before
    await peer.call("session.append", session_id="a", items=[user("x")])


def waiting_events() -> int:
    gc.collect()
    return sum(isinstance(one, asyncio.Event) for one in gc.get_objects())


async def test_a_session_that_is_gone_takes_no_place(peer: Peer) -> None:
    """DESIGN.md §3, memory: what was asked about unknown sessions is not remembered."""
    requests: list[tuple[str, Message]] = [
        ("session.events", {"since": 0, "wait_ms": 10}),
        ("session.get", {}),
        ("session.append", {"items": [EMPTY]}),
        ("session.compact", {}),
    ]
    before = waiting_events()
    for number in range(200):
        for method, params in requests:
            with pytest.raises(NotFound):
                await peer.call(method, session_id=f"none-{number}", **params)
    assert waiting_events() <= before + 5
    assert (await peer.call("server.info"))["sessions_loaded"] == 0


DAY_MS = 86_400_000


@pytest.mark.promise("T1")
@pytest.mark.parametrize("jumps_ms", [[0], [-30 * DAY_MS, 30 * DAY_MS, 0], [-1], [30 * DAY_MS]])
async def test_a_clock_that_jumps_or_stands_still_changes_no_order(
    start: Callable[..., AbstractAsyncContextManager[Daemon]], jumps_ms: list[int]
) -> None:
    """Revisions, ids and numbers of events tell the order; times are only shown."""
    jumps = itertools.cycle(jumps_ms)
    shown_ms = 1_796_083_200_000

    def now_ms() -> int:
        nonlocal shown_ms
        shown_ms += next(jumps)
        return shown_ms

    async with start(now_ms=now_ms) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        subscription = await peer.call("session.subscribe", session_id="a", since=0)
        for number in range(3):
            await peer.call("session.append", session_id="a", items=[user(f"{number}")] * 2)
        compacted = await peer.call("session.compact", session_id="a", operation_id="op")
        await peer.call("session.restore", session_id="a", revision=4)
        again = await peer.call("session.compact", session_id="a", operation_id="op")
        assert again == {**compacted, "replayed": True}
        page = await peer.call("session.get", session_id="a", limit=2)
        ids = [entry["id"] for entry in page["entries"]]
        while page["next_cursor"]:
            page = await peer.call(
                "session.get", session_id="a", limit=2, cursor=page["next_cursor"]
            )
            ids += [entry["id"] for entry in page["entries"]]
        assert ids == [1, 2, 3, 4, 5, 6, 7]
        assert subscription["from_seq"] == 0
        seqs: list[int] = []
        while len(seqs) < 8:
            params = (await peer.notice())["params"]
            seqs += [params["seq"]] if "seq" in params else []  # progress has none
        assert seqs == [*range(1, 9)]
        operation = (await peer.call("operation.get", operation_id="op"))["operation"]
        assert operation["status"] == "completed"
