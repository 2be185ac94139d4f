"""What a client and the log are told when something in the daemon fails (PROTOCOL.md §6)."""

import errno
import json
import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from tests.daemon.conftest import EMPTY, Daemon, Gate, Message, Peer, request, user

from recapd.protocol.errors import (
    InternalError,
    OutcomeUnknown,
    RpcError,
    StorageError,
    StorageFull,
    StorageReadonly,
)
from recapd.storage.errors import OutcomeUnknown as StoreOutcomeUnknown
from recapd.storage.errors import StorageError as StoreStorageError
from recapd.storage.ledger import Ledger
from recapd.storage.pending import Pending
from recapd.storage.sqlite import SqliteStore

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

SECRET = "hunter2-is-the-password"


def raising(error: BaseException) -> Any:
    async def fails(*args: object, **kwargs: object) -> object:
        raise error

    return fails


def as_it_is(value: object) -> object:
    return value


# Faults of the program.


@pytest.mark.parametrize(
    "error",
    [
        KeyError(SECRET),
        TypeError(SECRET),
        ValueError(SECRET),
        RuntimeError(f"/home/{SECRET}"),
        UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET),
        RecursionError(SECRET),
        MemoryError(SECRET),
        AssertionError(SECRET),
        TimeoutError(SECRET),
        ExceptionGroup(SECRET, [KeyError(SECRET)]),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_unexpected_fault_has_an_incident_and_tells_nothing(
    peer: Peer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    incidents: list[str],
    error: Exception,
) -> None:
    """PROTOCOL.md §6; BUGLOG B56: never `method_not_found` or `invalid_params` instead."""
    await peer.call("session.create", session_id="a")
    monkeypatch.setattr(SqliteStore, "revisions", raising(error))
    incidents.append("one")
    answer = await peer.answer(await peer.ask("session.revisions", session_id="a"))
    assert answer["error"]["code"] == InternalError.code
    data = answer["error"]["data"]
    assert (data["reason"], data["retryable"]) == ("internal_error", False)
    assert set(data) == {"reason", "retryable", "incident"}
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(logged) == 1
    assert data["incident"] in logged[0].getMessage()
    assert type(error).__name__ in logged[0].getMessage()
    for text in (json.dumps(answer), caplog.text):
        assert SECRET not in text
        assert "Traceback" not in text
        assert "/home" not in text
    await peer.call("protocol.ping")


async def test_a_fault_costs_the_other_entries_of_a_batch_nothing(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, incidents: list[str]
) -> None:
    """BUGLOG B56."""
    await peer.call("session.create", session_id="a")
    monkeypatch.setattr(SqliteStore, "revisions", raising(KeyError(SECRET)))
    incidents.append("one")
    await peer.say(
        [
            request(1, "session.revisions", session_id="a"),
            request(2, "protocol.ping"),
            request(3, "session.append", session_id="a", items=[user("x")]),
        ]
    )
    answers = {answer["id"]: answer for answer in await peer.message()}
    assert "error" in answers[1]
    assert "result" in answers[2]
    assert "result" in answers[3]


@pytest.mark.parametrize("result", [b"bytes", {"score": float("nan")}, {1: 2}, {3}, object()])
async def test_a_result_that_is_no_json_is_an_internal_error(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, incidents: list[str], result: object
) -> None:
    """BUGLOG B56: it does not break dispatch."""

    async def found(*_: object) -> object:
        return [result]

    await peer.call("session.create", session_id="a")
    monkeypatch.setattr(SqliteStore, "revisions", found)
    monkeypatch.setattr("recapd.daemon.handlers.history.wire_revision", as_it_is)
    monkeypatch.setattr("recapd.daemon.handlers.history.m.RevisionsResult", as_it_is)
    incidents.append("one")
    with pytest.raises(InternalError):
        await peer.call("session.revisions", session_id="a")
    await peer.call("protocol.ping")


async def test_a_fault_in_a_change_undoes_that_change_only(
    start: Start, monkeypatch: pytest.MonkeyPatch, incidents: list[str]
) -> None:
    """DESIGN.md promise 2: others in the same transaction are made."""
    append = Ledger.append

    def fails(self: Ledger, session_id: str, items: Any, *rest: Any) -> Any:
        done = append(self, session_id, items, *rest)
        if b"poison" in items[0].item:
            raise KeyError(SECRET)
        return done

    monkeypatch.setattr(Ledger, "append", fails)
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a")
        texts = [f"{'poison' if number % 10 == 3 else 'good'} {number}" for number in range(60)]
        incidents.extend(text for text in texts if "poison" in text)
        await peer.say(
            [request(text, "session.append", session_id="a", items=[user(text)]) for text in texts]
        )
        failed = [answer["id"] for answer in await peer.message() if "error" in answer]
        assert failed == [text for text in texts if "poison" in text]
        entries = await peer.entries("a")
        assert [e["item"]["content"] for e in entries] == [t for t in texts if "good" in t]
        assert [entry["id"] for entry in entries] == list(range(1, 55))
        events = (await peer.call("session.events", session_id="a", since=0))["events"]
        assert [event["seq"] for event in events] == list(range(1, 56))


async def test_a_fault_in_a_compaction_ends_it_as_failed(
    peer: Peer, gate: Gate, incidents: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """PROTOCOL.md §5.6: any failure is an explicit error, and leaves everything as it was."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    gate.fails_with = KeyError(SECRET)
    gate.open()
    incidents.append("one")
    with pytest.raises(InternalError) as caught:
        await peer.call("session.compact", session_id="a", operation_id="op")
    operation = (await peer.call("operation.get", operation_id="op"))["operation"]
    assert operation["status"] == "failed"
    assert operation["error"] == caught.value.to_wire()
    assert SECRET not in caplog.text + json.dumps(operation)
    read = await peer.call("session.get", session_id="a")
    assert (read["session"]["busy"], read["session"]["generation"]) == (False, 0)
    gate.fails_with = None
    await peer.call("session.compact", session_id="a")


# Faults of the disk.


def sqlite_error(code: int, name: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(SECRET)
    error.sqlite_errorcode = code
    error.sqlite_errorname = name
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (sqlite_error(sqlite3.SQLITE_FULL, "SQLITE_FULL"), StorageFull),
        (OSError(errno.ENOSPC, SECRET), StorageFull),
        (OSError(errno.EDQUOT, SECRET), StorageFull),
        (sqlite_error(sqlite3.SQLITE_READONLY, "SQLITE_READONLY"), StorageReadonly),
        (OSError(errno.EROFS, SECRET), StorageReadonly),
        (sqlite_error(sqlite3.SQLITE_IOERR, "SQLITE_IOERR"), StorageError),
        (sqlite_error(sqlite3.SQLITE_BUSY, "SQLITE_BUSY"), StorageError),
        (OSError(errno.EIO, SECRET), StorageError),
        (StoreOutcomeUnknown(), OutcomeUnknown),
    ],
    ids=str,
)
async def test_a_failing_disk_is_told_and_the_session_is_as_it_was(
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    incidents: list[str],
    error: Exception,
    expected: type[StorageError],
) -> None:
    """DESIGN.md promise 13; PROTOCOL.md §6, 1013: service resumes when the disk does."""
    append = Ledger.append
    failing = False

    def fails(self: Ledger, *params: Any) -> Any:
        if failing:
            raise error
        return append(self, *params)

    monkeypatch.setattr(Ledger, "append", fails)
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        before = await peer.call("session.get", session_id="a")
        failing = True
        with pytest.raises(expected) as caught:
            await peer.call("session.append", session_id="a", items=[user("y")])
        if expected is StorageError:
            incidents.append("logged")
        assert (type(caught.value), caught.value.code) == (expected, 1013)
        assert SECRET not in str(caught.value.to_wire()) + caplog.text
        assert await peer.call("session.get", session_id="a") == before
        failing = False
        await peer.call("session.append", session_id="a", items=[user("y")])
        assert len(await peer.items("a")) == 2


@pytest.mark.parametrize(
    ("method", "change", "params"),
    [
        ("session.create", "create", {"session_id": "b"}),
        ("session.append", "append", {"session_id": "a", "items": [EMPTY]}),
        ("session.update", "update", {"session_id": "a", "title": "t"}),
        ("session.compact", "begin", {"session_id": "a"}),
        ("session.rewind", "replace", {"session_id": "a", "after_entry_id": 0}),
        ("session.rewind", "keep", {"session_id": "a", "after_entry_id": 1}),
        ("session.fork", "create", {"session_id": "a"}),
        ("session.delete", "delete", {"session_id": "a"}),
    ],
)
async def test_a_full_disk_is_told_whatever_was_to_be_changed(
    start: Start, monkeypatch: pytest.MonkeyPatch, method: str, change: str, params: Message
) -> None:
    """PROTOCOL.md §6, `storage_full`; the very same request succeeds when there is room."""
    change_it = getattr(Ledger, change)
    failing = True

    def fails(self: Ledger, *arguments: Any) -> Any:
        done = change_it(self, *arguments)
        if failing:
            raise OSError(errno.ENOSPC, SECRET)
        return done

    async with start() as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[user("x")])
        before = await peer.call("session.list")
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, change, fails)
            with pytest.raises(StorageFull) as caught:
                await peer.call(method, operation_id="op", **params)
            assert caught.value.retryable is True
            assert await peer.call("session.list") == before
            failing = False
            assert "replayed" not in await peer.call(method, operation_id="op", **params)


@pytest.mark.promise("D7")
@pytest.mark.parametrize("ends", [True, False], ids=["told at once", "told when asked for"])
@pytest.mark.parametrize("made", [True, False], ids=["made", "not made"])
async def test_a_compaction_whose_commit_nobody_saw_has_the_outcome_that_is_found(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, made: bool, ends: bool
) -> None:
    """`outcome_unknown` is an answer, never what an operation ended with (PROTOCOL.md §6)."""
    replace, end = SqliteStore.replace, SqliteStore.end

    def unseen(self: SqliteStore, *params: Any, **named: Any) -> Any:
        pending: Pending[Any] = Pending()
        if made:
            replace(self, *params, **named).on_done(lambda _: pending.reject(StoreOutcomeUnknown()))
        else:
            pending.reject(StoreOutcomeUnknown())
        return pending

    def fails(*_: object) -> Pending[Any]:
        pending: Pending[Any] = Pending()
        pending.reject(StoreStorageError("io"))
        return pending

    await peer.call("session.create", session_id="a", items=[user("x"), user("y")])
    monkeypatch.setattr(SqliteStore, "replace", unseen)
    if not ends:
        monkeypatch.setattr(SqliteStore, "end", fails)
    answer: Message = {}
    failure = ""
    try:
        answer = await peer.call("session.compact", session_id="a", operation_id="op")
    except RpcError as error:
        failure = error.reason
    monkeypatch.setattr(SqliteStore, "replace", replace)
    monkeypatch.setattr(SqliteStore, "end", end)

    operation = (await peer.call("operation.get", operation_id="op"))["operation"]
    assert operation["status"] == ("completed" if made else "failed")
    now = (await peer.call("session.get", session_id="a"))["session"]
    assert (now["busy"], now["generation"]) == (False, int(made))
    assert failure == (
        "outcome_unknown" if not ends else "" if made else operation["error"]["data"]["reason"]
    )
    if made:
        again = await peer.call("session.compact", session_id="a", operation_id="op")
        assert again.pop("replayed") is True
        assert again == operation["result"]
        assert answer in ({}, again)
    else:
        assert operation["error"]["data"]["reason"] == "storage_error"
        with pytest.raises(StorageError):
            await peer.call("session.compact", session_id="a", operation_id="op")
    seen = await peer.call("session.events", session_id="a", since=0)
    assert [event["method"] for event in seen["events"]].count("compaction.finished") == 1


async def test_a_failing_disk_is_told_to_readers_too(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, incidents: list[str]
) -> None:
    """PROTOCOL.md §6, 1013; methods.py names it for each method that reads."""
    await peer.call("session.create", session_id="a")
    failing = sqlite_error(sqlite3.SQLITE_IOERR, "SQLITE_IOERR")
    from recapd.storage import errors

    for name in ("session", "sessions", "revisions", "page", "events", "operation", "health"):
        monkeypatch.setattr(SqliteStore, name, raising(errors.StorageError(str(failing))))
    for method, params in (
        ("session.list", {}),
        ("session.get", {"session_id": "a"}),
        ("session.get", {"session_id": "a", "view": "info"}),
        ("session.revisions", {"session_id": "a"}),
        ("session.export", {"session_id": "a"}),
        ("session.subscribe", {"session_id": "a"}),
        ("session.events", {"session_id": "a", "since": 0}),
        ("operation.get", {"operation_id": "op"}),
        ("operation.cancel", {"operation_id": "op"}),
        ("server.health", {}),
    ):
        incidents.append(method)
        with pytest.raises(StorageError):
            await peer.call(method, **params)
    await peer.call("protocol.ping")


async def test_a_subscriber_that_cannot_be_served_from_the_log_is_sent_away(
    daemon: Daemon, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DESIGN.md promise 4: it resumes by `seq` when it is back; never a gap instead."""
    from recapd.storage import errors

    await peer.call("session.create", session_id="a")
    async with daemon.connect() as other:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteStore, "events", raising(errors.StorageError("io")))
            await other.ask("session.subscribe", session_id="a", since="start")
            (answer,) = await other.until_closed()
            assert "result" in answer
    async with daemon.connect() as other:
        await other.call("session.subscribe", session_id="a", since=0)
        assert (await other.notice())["method"] == "session.created"


# The log.


async def test_the_log_has_nothing_of_what_was_said(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """logs.py; BUGLOG B46: no message text, no ids of clients' making, no paths, at any level."""
    secrets = {name: f"{SECRET}-{name}" for name in ("item", "title", "cwd", "label", "id", "op")}
    params: Message = {"session_id": secrets["id"]}
    async with start() as daemon, daemon.connect() as peer:
        await peer.call("protocol.initialize", client={"name": SECRET})
        await peer.call(
            "session.create",
            title=secrets["title"],
            cwd=secrets["cwd"],
            labels={"l": secrets["label"]},
            items=[user(secrets["item"])],
            **params,
        )
        for method, more in (
            ("session.append", {"items": [user(secrets["item"])], "operation_id": secrets["op"]}),
            ("session.append", {"items": [secrets["item"]]}),
            ("session.append", {SECRET: 1}),
            ("session.get", {"cursor": SECRET}),
            ("session.get", {"revision": 99}),
            ("session.compact", {"operation_id": secrets["op"] + "2"}),
            ("session.compact", {"summary": SECRET}),
            ("session.export", {"format": SECRET}),
            ("session.subscribe", {}),
            ("session.delete", {}),
            (SECRET, {}),
        ):
            await peer.answer(await peer.ask(method, **params, **more))
        await peer.send(b'{"' + SECRET.encode() + b"\n")
        await peer.send(b"Content-Length: " + SECRET.encode() + b"\n")
        await peer.rest()
    assert caplog.records
    assert SECRET not in caplog.text
    assert str(daemon.settings.data_dir) not in caplog.text
    assert os.environ.get("HOME", "/root") + "/" not in caplog.text


async def test_a_flood_of_client_mistakes_is_no_flood_of_log_lines(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    """BUGLOG B58: what clients do wrong is theirs."""
    for _ in range(100):
        await peer.send(b"nonsense\n")
        await peer.message()
        await peer.answer(await peer.ask("session.get", session_id="nobody"))
    assert len(caplog.records) < 10
