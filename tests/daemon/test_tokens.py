"""Who may do what (PROTOCOL.md §7): tokens, their scopes and their sessions."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from tests.daemon.conftest import WAIT_S, Daemon, Gate, Message, Peer, user

from recapd.protocol.client import connect
from recapd.protocol.errors import Forbidden, InvalidParams, Unauthenticated
from recapd.protocol.methods import METHODS, SCOPES, Scope
from recapd.storage.backup import make_backup, restore_backup
from recapd.storage.errors import StorageFull
from recapd.storage.pending import Pending
from recapd.storage.sqlite import SqliteStore, open_store

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

NEEDED: Final[dict[str, tuple[Scope | None, Message]]] = {
    "protocol.initialize": (None, {}),
    "protocol.ping": (None, {}),
    "rpc.discover": (None, {}),
    "server.info": (None, {}),
    "server.health": (None, {}),
    "server.shutdown": ("admin", {}),
    "session.create": ("session.write", {"session_id": "new"}),
    "session.list": ("session.read", {}),
    "session.get": ("session.read", {"session_id": "a"}),
    "session.revisions": ("session.read", {"session_id": "a"}),
    "session.verify": ("session.read", {"session_id": "a"}),
    "session.append": ("session.write", {"session_id": "a", "items": [user("y")]}),
    "session.compact": ("session.compact", {"session_id": "a", "dry_run": True}),
    "session.restore": ("session.write", {"session_id": "a", "revision": 1}),
    "session.rewind": ("session.write", {"session_id": "a", "after_entry_id": 1}),
    "session.fork": ("session.write", {"session_id": "a", "new_session_id": "fork"}),
    "session.export": ("session.read", {"session_id": "a"}),
    "session.update": ("session.write", {"session_id": "a", "title": "t"}),
    "session.delete": ("session.delete", {"session_id": "none"}),
    "session.subscribe": ("session.read", {"session_id": "a"}),
    "session.unsubscribe": ("session.read", {"subscription_id": "x"}),
    "session.events": ("session.read", {"session_id": "a", "since": 0}),
    "operation.get": ("session.read", {"operation_id": "op"}),
    "operation.cancel": ("session.compact", {"operation_id": "none"}),
    "token.create": ("admin", {"label": "l", "scopes": ["admin"]}),
    "token.list": ("admin", {}),
    "token.revoke": ("admin", {"token_id": "none"}),
}
"""What each method needs, and parameters with which the owner is not refused."""


@asynccontextmanager
async def bearer(daemon: Daemon, token: str) -> AsyncGenerator[Peer]:
    """A connection that has presented a token."""
    async with daemon.connect() as peer:
        await peer.call("protocol.initialize", token=token)
        yield peer


async def token_of(peer: Peer, *scopes: Scope, **params: object) -> str:
    created = await peer.call("token.create", label="a test", scopes=scopes, **params)
    token: str = created["token"]
    return token


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def refusal(peer: Peer, method: str, /, **params: object) -> str | None:
    """Why the request is refused, if it is."""
    answer = await peer.answer(await peer.ask(method, **params))
    return answer["error"]["data"]["reason"] if "error" in answer else None


# Scopes.


def test_the_table_has_every_method() -> None:
    assert NEEDED.keys() == METHODS.keys()


@pytest.mark.promise("S6")
@pytest.mark.parametrize("scope", SCOPES)
async def test_a_token_has_its_scopes_only(daemon: Daemon, peer: Peer, scope: Scope) -> None:
    """Every method by every scope; the refusal names the scope and changes nothing."""
    await peer.call("session.create", session_id="a", items=[user("x")], operation_id="op")
    token = await token_of(peer, scope)
    for method, (needed, params) in sorted(
        NEEDED.items(), key=lambda row: row[0] == "server.shutdown"
    ):
        allowed = needed in (None, scope, "session.read" if scope == "history.full" else None)
        async with daemon.connect() as weaker:
            if method == "protocol.initialize":
                params = {"token": token}
            else:
                await weaker.call("protocol.initialize", token=token)
            answer = await weaker.answer(await weaker.ask(method, **params))
        if allowed:
            reason = answer.get("error", {}).get("data", {}).get("reason")
            assert reason not in ("forbidden", "unauthenticated"), method
        else:
            assert answer["error"]["code"] == 1002, method
            assert answer["error"]["data"] == {
                "reason": "forbidden",
                "retryable": False,
                "scope": needed,
            }
    if scope not in ("session.write", "admin"):
        session = (await peer.call("session.get", session_id="a"))["session"]
        assert (session["revision"], session["title"]) == (1, None)
        assert len((await peer.call("session.list"))["sessions"]) == 1


async def test_what_a_parameter_asks_for_needs_its_scope_as_well(
    daemon: Daemon, peer: Peer
) -> None:
    await peer.call("session.create", session_id="a", items=[user("x")])
    automatic = {"auto_compact": {"at_tokens": 5000}}
    async with bearer(daemon, await token_of(peer, "session.read", "session.write")) as weaker:
        assert await refusal(weaker, "session.create", **automatic) == "forbidden"
        assert await refusal(weaker, "session.update", session_id="a", **automatic) == "forbidden"
        assert await refusal(weaker, "session.export", session_id="a", redact="none") == "forbidden"


async def test_a_client_is_told_what_its_token_allows(daemon: Daemon, peer: Peer) -> None:
    full = await token_of(peer, "history.full")
    async with daemon.connect() as weaker:
        told = await weaker.call("protocol.initialize", token=full)
    assert told["principal"]["scopes"] == ["history.full", "session.read"]


# Sessions.

HIDDEN: Final[dict[str, Message]] = {
    "session.get": {},
    "session.revisions": {},
    "session.verify": {},
    "session.append": {"items": [user("y")]},
    "session.compact": {},
    "session.restore": {"revision": 1},
    "session.rewind": {"after_entry_id": 1},
    "session.fork": {"new_session_id": "seen-2"},
    "session.export": {},
    "session.update": {"title": "t"},
    "session.delete": {},
    "session.subscribe": {},
    "session.events": {"since": 0, "wait_ms": 100},
}
"""All methods with a session that is to exist."""


def test_every_method_of_a_session_is_met_where_it_is_hidden() -> None:
    assert HIDDEN.keys() == {
        name
        for name, method in METHODS.items()
        if "session_id" in method.params.__struct_fields__ and method.makes != "session_id"
    }


@pytest.mark.promise("S6")
async def test_other_sessions_are_not_there_for_a_token(
    daemon: Daemon, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes as for a session that is not there, and neither is looked for."""
    for name in ("seen", "hidden"):
        await peer.call("session.create", session_id=name, items=[user("x")])
    token = await token_of(peer, *SCOPES, sessions=["seen", "seen-2"])
    touched: list[object] = []

    def touch(*arguments: object) -> None:
        touched.append(arguments)

    async with bearer(daemon, token) as weaker:
        with monkeypatch.context() as patched:
            for name in ("_read", "_submit"):
                patched.setattr(SqliteStore, name, touch)
            for method, params in HIDDEN.items():
                answers: list[Message] = []
                for session_id in ("hidden", "not-there"):
                    id = await weaker.ask(method, session_id=session_id, **params)
                    answers.append(await weaker.answer(id) | {"id": 0})
                assert answers[0] == answers[1], method
                assert answers[0]["error"]["data"] == {
                    "reason": "not_found",
                    "retryable": False,
                    "what": "session",
                }
        assert touched == []
        session = (await peer.call("session.get", session_id="hidden"))["session"]
        assert (session["revision"], session["title"]) == (1, None)
        listed = await weaker.call("session.list")
        assert [session["session_id"] for session in listed["sessions"]] == ["seen"]
        assert (await weaker.call("session.verify"))["checked"] == 1
        assert (await peer.call("session.verify"))["checked"] == 2


async def test_a_token_makes_no_sessions_but_its_own(daemon: Daemon, peer: Peer) -> None:
    """Whether one of that id is there or not."""
    await peer.call("session.create", session_id="hidden")
    token = await token_of(peer, "session.write", "session.read", sessions=["mine", "fork"])
    async with bearer(daemon, token) as weaker:
        assert await refusal(weaker, "session.create", session_id="hidden") == "forbidden"
        assert await refusal(weaker, "session.create", session_id="other") == "forbidden"
        assert await refusal(weaker, "session.create") == "forbidden"
        await weaker.call("session.create", session_id="mine")
        for name in ("hidden", "other", None):
            params = {"session_id": "mine", "new_session_id": name}
            assert await refusal(weaker, "session.fork", **params) == "forbidden"
        await weaker.call("session.fork", session_id="mine", new_session_id="fork")
        assert len((await weaker.call("session.list"))["sessions"]) == 2


@pytest.mark.promise("S6")
async def test_operations_of_other_sessions_are_not_there(
    daemon: Daemon, peer: Peer, gate: Gate
) -> None:
    """Neither those that have ended nor a running one, for which nobody waits."""
    for name in ("seen", "hidden"):
        await peer.call("session.create", session_id=name, items=[user("x")], operation_id=name)
    running = await peer.ask("session.compact", session_id="hidden", operation_id="running")
    await gate.reached()
    token = await token_of(peer, *SCOPES, sessions=["seen"])
    async with bearer(daemon, token) as weaker:
        assert (await weaker.call("operation.get", operation_id="seen"))["operation"]
        answers: list[Message] = []
        for operation_id in ("not-there", "hidden", "running"):
            for method in ("operation.get", "operation.cancel"):
                id = await weaker.ask(method, operation_id=operation_id)
                answers.append(await weaker.answer(id) | {"id": 0})
            id = await weaker.ask("operation.get", operation_id=operation_id, wait_ms=600_000)
            answers.append(await weaker.answer(id) | {"id": 0})
        assert all(answer == answers[0] for answer in answers)
        assert answers[0]["error"]["data"]["reason"] == "not_found"
    gate.open()
    assert (await peer.result(running))["status"] == "completed"


@pytest.mark.promise("S6")
async def test_events_of_other_sessions_are_not_told(
    daemon: Daemon, peer: Peer, gate: Gate
) -> None:
    """Neither live nor from the log, nor how far their compaction is."""
    gate.open()
    for name in ("hidden", "seen"):
        await peer.call("session.create", session_id=name, items=[user("x")])
    token = await token_of(peer, "session.read", sessions=["seen"])
    async with bearer(daemon, token) as weaker:
        await weaker.call("session.subscribe", since="start")
        told = [await weaker.notice() for _ in range(2)]
        await peer.call("session.compact", session_id="hidden")
        await peer.call("session.append", session_id="seen", items=[user("y")])
        told.append(await weaker.notice())
        await weaker.call("protocol.ping")
        assert not weaker.notices
    assert [notice["params"]["session_id"] for notice in told] == ["seen"] * 3


# Which tokens are good.


@pytest.mark.promise("S6")
async def test_a_token_that_is_not_good_is_refused_whatever_it_is(start: Start) -> None:
    """Unknown, expired or revoked: the same bytes; and nothing else may be asked then."""
    now_ms = 1_796_083_200_000
    async with start(now_ms=lambda: now_ms) as daemon, daemon.connect() as peer:
        revoked = await token_of(peer, "session.read")
        await peer.call("token.revoke", token=revoked)
        expired = await token_of(peer, "session.read", ttl_s=5)
        good = await token_of(peer, "session.read", ttl_s=6)
        now_ms += 5000
        answers: list[Message] = []
        for token in (revoked, expired, "recapd_unknown", "", good + "x", good.lower()):
            async with daemon.connect() as weaker:
                id = await weaker.ask("protocol.initialize", token=token)
                answers.append(await weaker.answer(id) | {"id": 0})
                for method, (_, params) in NEEDED.items():
                    if method != "protocol.initialize":
                        assert await refusal(weaker, method, **params) == "unauthenticated"
        assert all(answer == answers[0] for answer in answers)
        assert answers[0]["error"]["code"] == -32004
        async with bearer(daemon, good) as bearing:
            await bearing.call("session.list")
            now_ms += 1000
            for method, (_, params) in NEEDED.items():
                assert await refusal(bearing, method, **params) in (
                    *("unauthenticated", "invalid_request"),
                )
        assert [one["label"] for one in (await peer.call("token.list"))["tokens"]] == []


async def test_a_token_with_the_wrong_protocol_is_no_way_to_be_its_owner(
    daemon: Daemon, peer: Peer
) -> None:
    token = await token_of(peer, "session.read")
    async with daemon.connect() as weaker:
        assert await refusal(weaker, "protocol.initialize", token=token, protocol=7) == (
            "unsupported_protocol"
        )
        assert await refusal(weaker, "session.create") == "forbidden"


@pytest.mark.promise("S6")
async def test_a_revoked_token_ends_what_waits(
    daemon: Daemon,
    peer: Peer,
    gate: Gate,
) -> None:
    """Waiting calls, running compactions and subscriptions; other connections go on."""
    for name in ("a", "b"):
        await peer.call("session.create", session_id=name, items=[user("x")])
    await peer.call("session.subscribe", session_id="a")
    token = await token_of(peer, *SCOPES)
    (shown,) = (await peer.call("token.list"))["tokens"]
    async with bearer(daemon, token) as one, bearer(daemon, token) as other:
        subscription = await other.call("session.subscribe")
        waiting = [
            await one.ask("session.events", session_id="a", since=2, wait_ms=600_000),
            await one.ask("session.compact", session_id="b", operation_id="c"),
        ]
        await gate.reached()
        waiting.append(await one.ask("operation.get", operation_id="c", wait_ms=600_000))
        await one.call("protocol.ping")
        assert await peer.call("token.revoke", token_id=shown["token_id"]) == {"revoked": True}
        for id in waiting:
            with pytest.raises(Unauthenticated):
                await one.result(id)
        told = await other.notice("subscription.ended")
        assert told["params"] == {
            "subscription_id": subscription["subscription_id"],
            "reason": "unauthenticated",
        }
        gate.open()
        other.notices.clear()
        await peer.call("session.append", session_id="a", items=[user("y")])
        assert (await peer.notice("history.appended"))["params"]["session_id"] == "a"
        for connection in (one, other):
            for method, (_, params) in NEEDED.items():
                if method != "protocol.initialize":
                    assert await refusal(connection, method, **params) == "unauthenticated"
            assert not connection.notices
    ended = await peer.call("operation.get", operation_id="c", wait_ms=600_000)
    assert ended["operation"]["status"] == "cancelled"
    assert await peer.call("token.revoke", token=token) == {"revoked": False}
    info = await peer.until(lambda info: info["connections"] == 1, "server.info")
    assert info["server"]["name"] == "recapd"


async def test_a_change_that_was_handed_over_is_answered_as_it_ended(
    daemon: Daemon, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its token is revoked while it is being made: to say that it was refused would be untrue."""
    await peer.call("session.create", session_id="a")
    token = await token_of(peer, "session.write")
    reached, go = anyio.Event(), anyio.Event()
    make: Any = getattr(SqliteStore, "_make")  # noqa: B009

    async def wait(self: SqliteStore, batch: object) -> object:
        reached.set()
        await go.wait()
        return await make(self, batch)

    monkeypatch.setattr(SqliteStore, "_make", wait)
    async with bearer(daemon, token) as weaker:
        append = await weaker.ask("session.append", session_id="a", items=[user("x")])
        with anyio.fail_after(WAIT_S):
            await reached.wait()
            revoke = await peer.ask("token.revoke", token=token)
            while await refusal(weaker, "protocol.ping") is None:
                pass
        go.set()
        assert (await weaker.result(append))["entry_ids"] == [1]
        assert await peer.result(revoke) == {"revoked": True}


async def test_a_subscription_ends_when_its_token_expires(daemon: Daemon, peer: Peer) -> None:
    """In real time: nobody has to ask or to append anything."""
    token = await token_of(peer, "session.read", ttl_s=1)
    async with bearer(daemon, token) as weaker:
        await weaker.call("session.subscribe")
        assert (await weaker.notice())["method"] == "subscription.ended"
        assert await refusal(weaker, "protocol.ping") == "unauthenticated"


async def test_nothing_is_told_once_a_token_has_expired(start: Start) -> None:
    """Also where the clock was put forward, and the daemon has not looked at it yet."""
    now_ms = 1_796_083_200_000
    async with start(now_ms=lambda: now_ms) as daemon, daemon.connect() as peer:
        token = await token_of(peer, "session.read", ttl_s=3600)
        async with bearer(daemon, token) as weaker:
            await weaker.call("session.subscribe")
            await peer.call("session.create", session_id="a")
            assert (await weaker.notice())["method"] == "session.created"
            waiting = await weaker.ask("session.events", session_id="a", since=1, wait_ms=600_000)
            await weaker.call("protocol.ping")
            now_ms += 3_600_000
            await peer.call("session.append", session_id="a", items=[user("x")])
            with pytest.raises(Unauthenticated):
                await weaker.result(waiting)
            assert await refusal(weaker, "protocol.ping") == "unauthenticated"
            assert not weaker.notices


# Making and ending them.


async def test_a_token_gives_no_more_than_its_maker_has(start: Start) -> None:
    now_ms = 1_796_083_200_000
    async with start(now_ms=lambda: now_ms) as daemon, daemon.connect() as peer:
        token = await token_of(peer, "admin", "session.read", sessions=["a", "b"], ttl_s=60)
        async with bearer(daemon, token) as maker:

            async def reason(*scopes: Scope, **params: object) -> str | None:
                return await refusal(maker, "token.create", label="l", scopes=scopes, **params)

            assert await reason("history.full", sessions=["a"]) == "forbidden"
            assert await reason("session.read", "session.write", sessions=["a"]) == "forbidden"
            assert await reason("session.read") == "forbidden"
            assert await reason("session.read", sessions=["a", "c"]) == "forbidden"
            made = await maker.call(
                "token.create", label="l", scopes=["session.read"], sessions=["b", "a", "b"]
            )
            assert made["sessions"] == ["a", "b"]
            assert made["expires_at"] == "2026-12-01T00:01:00.000Z"
            sooner = await maker.call(
                "token.create", label="l", scopes=["admin"], sessions=["a"], ttl_s=1
            )
            assert sooner["expires_at"] == "2026-12-01T00:00:01.000Z"


async def test_a_token_ends_with_the_one_it_was_made_with(daemon: Daemon, peer: Peer) -> None:
    """And who has a token sees and ends only what was made with it."""
    other = await token_of(peer, "session.read")
    parent = await token_of(peer, "admin")
    async with bearer(daemon, parent) as making:
        child = await token_of(making, "admin")
        async with bearer(daemon, child) as making_too:
            grandchild = await token_of(making_too, "admin")
            assert len((await making_too.call("token.list"))["tokens"]) == 1
            for token in (other, parent, child):
                assert await making_too.call("token.revoke", token=token) == {"revoked": False}
        assert len((await making.call("token.list"))["tokens"]) == 2
        assert len((await peer.call("token.list"))["tokens"]) == 4
        async with bearer(daemon, grandchild) as last:
            assert await peer.call("token.revoke", token=parent) == {"revoked": True}
            assert await refusal(last, "protocol.ping") == "unauthenticated"
        assert await refusal(making, "token.create", label="l", scopes=["admin"]) == (
            "unauthenticated"
        )
    for token in (parent, child, grandchild):
        async with daemon.connect() as weaker:
            assert await refusal(weaker, "protocol.initialize", token=token) == "unauthenticated"
    async with bearer(daemon, other) as unharmed:
        await unharmed.call("session.list")
    assert len((await peer.call("token.list"))["tokens"]) == 1


async def test_what_is_made_while_its_maker_is_revoked_is_not_good(
    daemon: Daemon, peer: Peer
) -> None:
    """Of the two the one comes first: it may be made and ended, or refused, but not be left."""
    for _ in range(20):
        parent = await token_of(peer, "admin")
        async with bearer(daemon, parent) as making:
            ids = [await making.ask("token.create", label="l", scopes=["admin"]) for _ in range(5)]
            await peer.call("token.revoke", token=parent)
            for id in ids:
                answer = await making.answer(id)
                if "error" in answer:
                    assert answer["error"]["data"]["reason"] == "unauthenticated"
        assert (await peer.call("token.list"))["tokens"] == []


async def test_a_token_is_revoked_by_its_id_or_itself(peer: Peer) -> None:
    for params in ({}, {"token_id": "x", "token": "y"}):
        with pytest.raises(InvalidParams):
            await peer.call("token.revoke", **params)
    for params in ({"token_id": "x"}, {"token": "y"}):
        assert await peer.call("token.revoke", **params) == {"revoked": False}


async def test_a_token_is_no_longer_good_although_the_disk_is_full(
    daemon: Daemon, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever revokes it is told that it has to be done again."""
    token = await token_of(peer, "session.read")

    def full(self: SqliteStore, token_ids: object) -> Pending[None]:
        pending = Pending[None]()
        pending.reject(StorageFull())
        return pending

    async with bearer(daemon, token) as weaker:
        with monkeypatch.context() as patched:
            patched.setattr(SqliteStore, "remove_tokens", full)
            assert await refusal(peer, "token.revoke", token=token) == "storage_full"
        assert await refusal(weaker, "session.list") == "unauthenticated"
    assert len((await peer.call("token.list"))["tokens"]) == 1
    assert await peer.call("token.revoke", token=token) == {"revoked": True}
    assert (await peer.call("token.list"))["tokens"] == []


async def test_tokens_outlive_the_daemon_and_are_nowhere_on_the_disk(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor in a backup: one that was revoked since would be good again."""
    async with start() as daemon, daemon.connect() as peer:
        token = await token_of(peer, "session.read")
        revoked = await token_of(peer, "session.read")
        await peer.call("token.revoke", token=revoked)
    assert not [path for path in files_of(folder) if token.encode() in path.read_bytes()]
    assert token not in caplog.text
    async with start() as daemon:
        async with bearer(daemon, token) as weaker:
            await weaker.call("session.list")
        async with daemon.connect() as peer:
            assert await refusal(peer, "protocol.initialize", token=revoked) == "unauthenticated"
    make_backup(folder / "data", folder / "backup", recapd="", now_ms=lambda: 0)
    restore_backup(folder / "backup", folder / "data", replace=True)
    async with open_store(folder / "data") as store:
        assert await store.tokens() == []


async def test_a_client_presents_its_token_each_time_it_connects(
    daemon: Daemon, peer: Peer
) -> None:
    """And hears of it when it is no longer good, whatever it waits for."""
    await peer.call("session.create", session_id="a")
    token = await token_of(peer, "session.read")
    async with connect(daemon.settings.socket, token=token) as client:
        assert client.server.principal.scopes == ("session.read",)
        with pytest.raises(Forbidden):
            await client.request("session.create")
        async with client.subscribe("a") as events:
            await peer.call("session.update", session_id="a", title="t")
            assert (await anext(events)).method == "session.updated"
            await peer.call("token.revoke", token=token)
            for _ in range(2):
                with pytest.raises(Unauthenticated):
                    await anext(events)
    with pytest.raises(Unauthenticated):
        async with connect(daemon.settings.socket, token=token):
            pass
