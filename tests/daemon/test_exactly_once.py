"""What makes a change happen at most once, and only where it was meant (PROTOCOL.md §2)."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from tests.daemon.conftest import Daemon, Gate, Message, Peer, user

from recapd.protocol.errors import (
    Conflict,
    NothingToCompact,
    OperationIdReused,
    ResultTooLarge,
)

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

MUTATIONS: dict[str, tuple[Message, Message]] = {
    "session.create": ({"session_id": "new"}, {"session_id": "new", "title": "other"}),
    "session.append": (
        {"session_id": "a", "items": [user("y")]},
        {"session_id": "a", "items": [user("z")]},
    ),
    "session.compact": ({"session_id": "a"}, {"session_id": "a", "keep_recent_tokens": 1}),
    "session.restore": ({"session_id": "a", "revision": 1}, {"session_id": "a", "revision": 2}),
    "session.rewind": (
        {"session_id": "a", "after_entry_id": 0},
        {"session_id": "a", "after_entry_id": 1},
    ),
    "session.fork": (
        {"session_id": "a", "new_session_id": "new"},
        {"session_id": "a", "new_session_id": "newer"},
    ),
    "session.update": ({"session_id": "a", "title": "t"}, {"session_id": "a", "title": None}),
    "session.delete": ({"session_id": "a"}, {"session_id": "b"}),
}
"""Parameters of every mutation, and others."""

EXPECTING = [method for method in MUTATIONS if method != "session.create"]


async def look(peer: Peer) -> Any:
    """All that there is."""
    sessions = (await peer.call("session.list", sort="session_id", order="asc"))["sessions"]
    return sessions, [await peer.entries(session["session_id"]) for session in sessions]


@pytest.mark.parametrize("method", MUTATIONS)
@pytest.mark.parametrize("restart", [False, True])
async def test_a_repeated_operation_id_gives_the_recorded_result(
    start: Start, method: str, restart: bool
) -> None:
    """PROTOCOL.md §2, "Operation id": with `replayed: true`, also after a restart, done once."""
    params, _ = MUTATIONS[method]
    async with start() as daemon, daemon.connect() as peer:
        for name in "ab":
            await peer.call("session.create", session_id=name, items=[user("x")])
        first = await peer.call(method, operation_id="op", **params)
        before = await look(peer)
        if not restart:
            again = await peer.call(method, operation_id="op", _meta={"retry": 1}, **params)
            assert again == {**first, "replayed": True}
            assert await look(peer) == before
        operation = (await peer.call("operation.get", operation_id="op"))["operation"]
    async with start() as daemon, daemon.connect() as peer:
        again = await peer.call(method, operation_id="op", **params)
        assert again == {**first, "replayed": True}
        assert await look(peer) == before
        assert (await peer.call("operation.get", operation_id="op"))["operation"] == operation
    assert "replayed" not in first
    assert operation["method"] == method
    assert operation["session_id"] == params.get("new_session_id", params["session_id"])
    assert operation["status"] == "completed"
    assert operation["result"] == first
    assert operation["ended_at"] >= operation["started_at"]


@pytest.mark.parametrize("method", MUTATIONS)
async def test_an_operation_id_stands_for_one_method_and_its_parameters(
    peer: Peer, method: str
) -> None:
    """PROTOCOL.md §6, `operation_id_reused`; nothing is done."""
    params, others = MUTATIONS[method]
    for name in "ab":
        await peer.call("session.create", session_id=name, items=[user("x")])
    await peer.call(method, operation_id="op", **params)
    before = await look(peer)
    for other_method, other_params in (
        (method, others),
        *((name, given) for name, (given, _) in MUTATIONS.items() if name != method),
    ):
        with pytest.raises(OperationIdReused) as caught:
            await peer.call(other_method, operation_id="op", **other_params)
        assert caught.value.code == 1004
    assert await look(peer) == before


@pytest.mark.parametrize("method", EXPECTING)
@pytest.mark.parametrize(
    "expected",
    [
        {"expected_revision": 2},
        {"expected_revision": 4},
        {"expected_generation": 0},
        {"expected_generation": 2},
        {"expected_revision": 3, "expected_generation": 0},
        {"expected_revision": 1, "expected_generation": 1},
    ],
)
async def test_what_expects_another_revision_or_generation_is_refused(
    peer: Peer, method: str, expected: Message
) -> None:
    """PROTOCOL.md §2, "Expect": `conflict` with the actual values, nothing done."""
    params, _ = MUTATIONS[method]
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.call("session.compact", session_id="a")
    await peer.call("session.append", session_id="a", items=[user("y")])
    before = await look(peer)
    with pytest.raises(Conflict) as caught:
        await peer.call(method, operation_id="op", **params, **expected)
    assert (caught.value.code, caught.value.data) == (1003, {"revision": 3, "generation": 1})
    assert await look(peer) == before
    # A refusal is not recorded: with the right expectation the same id does it.
    await peer.call(method, operation_id="op", **params, expected_revision=3, expected_generation=1)
    assert await look(peer) != before


async def test_a_repetition_is_recognised_before_its_expectation_is_tested(peer: Peer) -> None:
    """PROTOCOL.md §2: a client that repeats what was done must not be told `conflict`."""
    await peer.call("session.create", session_id="a")
    params: Message = {"session_id": "a", "items": [user("x")], "expected_revision": 0}
    first = await peer.call("session.append", operation_id="op", **params)
    again = await peer.call("session.append", operation_id="op", **params)
    assert again == {**first, "replayed": True}


@pytest.mark.promise("D7")
async def test_a_repeated_compaction_waits_for_the_one_that_runs(
    daemon: Daemon, peer: Peer, gate: Gate
) -> None:
    """PROTOCOL.md §2; PROMISES.md D7: repeating with the same id does it at most once."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    first = await peer.ask("session.compact", session_id="a", operation_id="op")
    await gate.reached()
    async with daemon.connect() as other:
        second = await other.ask("session.compact", session_id="a", operation_id="op")
        await other.call("protocol.ping")
        gate.open()
        result = await peer.result(first)
        assert await other.result(second) == {**result, "replayed": True}
    assert gate.entered == 1
    session = (await peer.call("session.get", session_id="a"))["session"]
    assert (session["generation"], session["revision"]) == (1, 2)


async def test_a_failure_is_repeated_as_it_was_recorded(start: Start) -> None:
    """PROTOCOL.md §2: the recorded result of a compaction may be its error."""
    async with start(context_limit=200) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="empty")
        await peer.call("session.create", session_id="full", items=[user("word " * 2000)])
        for session_id, kind, params in (
            ("empty", NothingToCompact, {}),
            ("full", ResultTooLarge, {"summary": "word " * 300}),
        ):
            with pytest.raises(kind) as first:
                await peer.call(
                    "session.compact", session_id=session_id, operation_id=session_id, **params
                )
            await peer.call("session.append", session_id=session_id, items=[user("y")])
            with pytest.raises(kind) as again:
                await peer.call(
                    "session.compact", session_id=session_id, operation_id=session_id, **params
                )
            assert again.value.to_wire() == first.value.to_wire()
            assert len(await peer.items(session_id)) < 3
            operation = (await peer.call("operation.get", operation_id=session_id))["operation"]
            assert operation["error"] == first.value.to_wire()


async def test_operation_ids_of_different_clients_are_the_same_ids(
    daemon: Daemon, peer: Peer
) -> None:
    """PROTOCOL.md §2: a client that reconnects repeats under its own id."""
    await peer.call("session.create", session_id="a")
    async with daemon.connect() as other:
        params: Message = {"session_id": "a", "items": [user("x")], "operation_id": "op"}
        await peer.call("session.append", **params)
        assert (await other.call("session.append", **params))["replayed"] is True
    assert await peer.items("a") == [user("x")]


async def test_a_failed_change_leaves_its_operation_id_free(peer: Peer) -> None:
    """PROTOCOL.md §2: what was refused was not done, so there is nothing to repeat."""
    append: Message = {"session_id": "a", "items": [user("x")], "operation_id": "op"}
    answer = await peer.answer(await peer.ask("session.append", **append))
    assert answer["error"]["data"]["reason"] == "not_found"
    await peer.call("session.create", session_id="a")
    assert "replayed" not in await peer.call("session.append", **append)


async def test_the_same_change_without_an_operation_id_is_another_change(peer: Peer) -> None:
    """BUGLOG B36."""
    await peer.call("session.create", session_id="a")
    for _ in range(2):
        await peer.call("session.append", session_id="a", items=[user("x")])
    assert len(await peer.items("a")) == 2
