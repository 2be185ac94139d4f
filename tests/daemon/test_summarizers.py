"""Compactions whose summary a model makes, against a provider that is a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
import stamina
from tests.daemon.conftest import WAIT_S, Daemon, Message, Peer, notification, user
from tests.provider_stub import KINDS, SUMMARY, Json, events, serving, sse

from recapd.daemon.compaction.summarise.http import ATTEMPTS_MAX
from recapd.protocol.errors import (
    CompactionFailed,
    Conflict,
    InvalidParams,
    NotFound,
    NothingToCompact,
    ResultTooLarge,
)

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

PROJECT: Final = Path(__file__).parent.parent.parent
KEY: Final = "s3cret-of-the-provider"
HISTORY: Final = [
    {"role": "system", "content": "rule"},
    user("why does the build fail? " * 40),
    {"role": "assistant", "content": "I am looking. " * 40},
]


@pytest.fixture(scope="module")
def port() -> Generator[int]:
    """A provider in a process."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.provider_stub"],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": str(PROJECT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.stdin.close()
        assert process.wait(WAIT_S) == 0


@pytest.fixture(autouse=True)
def no_pauses() -> Iterator[None]:
    with stamina.set_testing(True, attempts=ATTEMPTS_MAX, cap=True):
        yield


def summarizers(port: int, play: str, **more: object) -> Json:
    """The tables of all kinds."""
    url = f"http://127.0.0.1:{port}/{play}/v1"
    return {
        kind: {"model": "m", "base_url": url, "attempt_timeout_s": 1, "deadline_s": 2, **more}
        for kind in KINDS
    }


async def begin(peer: Peer) -> Message:
    await peer.call("session.create", session_id="a", items=HISTORY)
    return await look(peer)


async def look(peer: Peer) -> Message:
    found: Message = await peer.call("session.get", session_id="a")
    found["session"].pop("busy")
    return found


@pytest.mark.parametrize("stream", [True, False])
async def test_a_model_of_each_kind_makes_the_summary(
    start: Start, port: int, stream: bool
) -> None:
    async with (
        start(summarizers=summarizers(port, "answer", stream=stream)) as daemon,
        daemon.connect() as peer,
    ):
        await begin(peer)
        for number, kind in enumerate(KINDS, start=1):
            result = await peer.call("session.compact", session_id="a", summarizer=kind, force=True)
            assert (result["quality"], result["attempts"]) == ("model", 1)
            (attempt,) = result["attempt_log"]
            assert (attempt["provider"], attempt["status"]) == (kind, "ok")
            assert attempt["usage"] == {"input_tokens": 30, "cached_tokens": 10, "output_tokens": 5}
            assert SUMMARY in (await peer.items("a"))[-1]["content"][0]["text"]
            assert len(await peer.items("a")) == 1 + number
            await peer.call("session.append", session_id="a", items=HISTORY[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("play", "stage", "status", "provider_status"),
    [
        ("stall", "summarise", "timeout", 200),
        ("cut", "summarise", "interrupted", 200),
        ("lie", "accept", "malformed", 200),
        ("limit", "summarise", "rate_limited", 429),
        ("fail_after_200", "accept", "provider_error", 200),
        ("refuse", "summarise", "unauthorized", 401),
        ("down", "summarise", "server_error", 503),
    ],
)
async def test_a_provider_that_fails_leaves_everything_as_it_was(
    start: Start, port: int, kind: str, play: str, stage: str, status: str, provider_status: int
) -> None:
    """BUGLOG B04, B05: an explicit error, never an offline summary; the next attempt works."""
    tables = summarizers(port, play)
    tables["chat" if kind != "chat" else "anthropic"]["base_url"] = (
        f"http://127.0.0.1:{port}/answer/v1"
    )
    async with start(summarizers=tables) as daemon, daemon.connect() as peer:
        before = await begin(peer)
        with pytest.raises(CompactionFailed) as failed:
            await peer.call("session.compact", session_id="a", operation_id="o", summarizer=kind)
        data = failed.value.data
        assert (data["stage"], data["provider_status"]) == (stage, provider_status)
        assert status in [attempt.status for attempt in failed.value.attempts]
        assert await look(peer) == before
        operation = (await peer.call("operation.get", operation_id="o"))["operation"]
        assert operation["status"] == "failed"
        assert operation["error"]["data"]["attempt_log"] == data["attempt_log"]
        await peer.call(
            "session.compact",
            session_id="a",
            summarizer="chat" if kind != "chat" else "anthropic",
        )
        revisions = await peer.call("session.revisions", session_id="a")
        assert len(revisions["revisions"]) == 1


async def test_a_provider_that_drips_is_listened_to(start: Start, port: int) -> None:
    """And `compaction.progress` tells how far it is."""
    async with start(summarizers=summarizers(port, "drip")) as daemon, daemon.connect() as peer:
        await begin(peer)
        await peer.call("session.subscribe", session_id="a", events=["compaction.progress"])
        for kind in KINDS:
            await peer.call("session.compact", session_id="a", summarizer=kind, force=True)
        told = await peer.notice("compaction.progress")
        assert 0 <= told["params"]["done"] <= told["params"]["total"]


async def test_a_window_that_is_smaller_than_said_is_found_out(start: Start, port: int) -> None:
    """BUGLOG B20: no history is too long; `quality` says that it came in pieces."""
    async with start(summarizers=summarizers(port, "narrow")) as daemon, daemon.connect() as peer:
        await begin(peer)
        await peer.call(
            "session.append",
            session_id="a",
            items=[user(f"part {number}: " + "words of it " * 300) for number in range(40)],
        )
        result = await peer.call("session.compact", session_id="a", summarizer="chat")
        assert result["quality"] == "chunked"
        statuses = [attempt["status"] for attempt in result["attempt_log"]]
        assert statuses.count("context_length_exceeded") >= 1
        assert statuses.count("ok") > 1
        assert result["attempts"] == len(statuses)


async def test_a_key_is_nowhere_but_in_its_header(
    start: Start, port: int, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The provider even repeats it in its error."""
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    tables = summarizers(port, "refuse", key_file=str(folder / "key"))
    async with (
        start(summarizers=tables, log_level="debug") as daemon,
        daemon.connect() as peer,
    ):
        await begin(peer)
        for kind in KINDS:
            id = await peer.ask("session.compact", session_id="a", summarizer=kind)
            assert KEY not in json.dumps(await peer.answer(id))
        exported = await peer.call("session.export", session_id="a", format="json")
        assert KEY not in exported["chunk"]
    stored = [path for path in (folder / "data").rglob("*") if path.is_file()]
    assert stored
    assert not [path for path in stored if KEY.encode() in path.read_bytes()]
    assert KEY not in caplog.text


async def test_a_key_file_that_others_may_read_is_refused(
    start: Start, port: int, folder: Path
) -> None:
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o644)
    tables = summarizers(port, "answer", key_file=str(folder / "key"))
    async with start(summarizers=tables) as daemon, daemon.connect() as peer:
        await begin(peer)
        with pytest.raises(CompactionFailed, match="unchanged") as failed:
            await peer.call("session.compact", session_id="a", summarizer="chat")
        assert failed.value.data["stage"] == "configure"


@pytest.mark.parametrize("tables", [{}, {"chat": {"base_url": "http://127.0.0.1:1/v1"}}])
async def test_a_summarizer_without_a_model_is_one_clear_error(start: Start, tables: Json) -> None:
    async with start(summarizers=tables) as daemon, daemon.connect() as peer:
        before = await begin(peer)
        with pytest.raises(CompactionFailed) as failed:
            await peer.call("session.compact", session_id="a", summarizer="chat")
        assert failed.value.data["stage"] == "configure"
        assert await look(peer) == before


async def test_the_default_summarizer_is_asked_where_none_is_named(start: Start, port: int) -> None:
    tables = summarizers(port, "answer")
    async with (
        start(summarizers=tables, default_summarizer="anthropic") as daemon,
        daemon.connect() as peer,
    ):
        await begin(peer)
        result = await peer.call("session.compact", session_id="a")
        assert result["attempt_log"][0]["provider"] == "anthropic"
        await peer.call("session.append", session_id="a", items=[user("x")])
        result = await peer.call("session.compact", session_id="a", summarizer="offline")
        assert (result["quality"], result["attempts"]) == ("offline", 0)


async def test_what_no_model_is_asked_about_cannot_be_asked_of_it(peer: Peer) -> None:
    await begin(peer)
    for params in (
        {"relevance": True},
        {"summary": "s", "summarizer": "chat"},
        {"summary": "s", "instructions": "i"},
        {"summary": "s", "relevance": True},
    ):
        with pytest.raises(InvalidParams):
            await peer.call("session.compact", session_id="a", **params)
    await peer.call("session.compact", session_id="a", instructions="Mind the *ports*.")
    text = (await peer.items("a"))[-1]["content"][0]["text"]
    assert "Asked for most: Mind the *ports*." in text


class Pending:
    """A provider that begins to answer and waits."""

    def __init__(self) -> None:
        self.begun = anyio.Event()
        self.may_end = anyio.Event()
        self.requests: list[Any] = []

    async def play(self, exchange: Any) -> None:
        self.requests.append(exchange)
        told = sse(events("chat", SUMMARY))
        await exchange.stream(told[:40])
        self.begun.set()
        await self.may_end.wait()
        await exchange.send(told[40:])
        await exchange.connection.send_eof()


async def test_while_a_model_thinks_appends_go_on_and_are_carried_over(start: Start) -> None:
    """BUGLOG B05, B13: one request to the model, whoever else asks."""
    pending = Pending()
    async with serving(pending.play) as stub:
        tables = summarizers(stub.port, "any", deadline_s=60, attempt_timeout_s=60)
        async with start(summarizers=tables) as daemon, daemon.connect() as peer:
            await begin(peer)
            id = await peer.ask("session.compact", session_id="a", summarizer="chat")
            async with daemon.connect() as other:
                with anyio.fail_after(WAIT_S):
                    await pending.begun.wait()
                await other.call("session.append", session_id="a", items=[user("late")])
                await other.call("session.create", session_id="b", items=[user("other")])
                pending.may_end.set()
            result = await peer.result(id)
            assert result["carried_over"] == 1
            assert (await peer.items("a"))[-1] == user("late")
            assert len(pending.requests) == 1


@pytest.mark.parametrize("way", ["request", "operation", "disconnect", "shutdown"])
async def test_a_cancel_reaches_the_provider(start: Start, way: str) -> None:
    """BUGLOG B57, B74: the connection to it is closed, and the history is what it was."""
    pending = Pending()
    async with serving(pending.play) as stub:
        tables = summarizers(stub.port, "any", deadline_s=60, attempt_timeout_s=60)
        async with start(summarizers=tables) as daemon, daemon.connect() as peer:
            before = await begin(peer)
            async with daemon.connect() as other:
                id = await other.ask(
                    "session.compact", session_id="a", operation_id="o", summarizer="chat"
                )
                with anyio.fail_after(WAIT_S):
                    await pending.begun.wait()
                if way == "request":
                    await other.say(notification("$/cancelRequest", id=id))
                    assert "error" in await other.answer(id)
                elif way == "operation":
                    await peer.call("operation.cancel", operation_id="o")
                    assert "error" in await other.answer(id)
                elif way == "shutdown":
                    await peer.call("server.shutdown", mode="now")
            if way != "shutdown":
                operation = await peer.call("operation.get", operation_id="o", wait_ms=10_000)
                assert operation["operation"]["status"] == "cancelled"
                assert await look(peer) == before
        await stub.until_connections(0)
    async with start() as daemon, daemon.connect() as peer:
        assert await look(peer) == before
        operation = await peer.call("operation.get", operation_id="o")
        assert operation["operation"]["status"] == "cancelled"


async def test_a_compaction_that_nobody_waits_for_goes_on(start: Start) -> None:
    pending = Pending()
    async with serving(pending.play) as stub:
        tables = summarizers(stub.port, "any", deadline_s=60, attempt_timeout_s=60)
        async with start(summarizers=tables) as daemon, daemon.connect() as peer:
            await begin(peer)
            async with daemon.connect() as other:
                await other.call(
                    "session.compact",
                    session_id="a",
                    operation_id="o",
                    summarizer="chat",
                    wait=False,
                )
            pending.may_end.set()
            operation = await peer.call("operation.get", operation_id="o", wait_ms=10_000)
            assert operation["operation"]["status"] == "completed"


@pytest.mark.parametrize("kind", [*KINDS, "offline"])
async def test_a_dry_run_tells_the_plan_and_the_request_and_does_nothing(
    start: Start, port: int, folder: Path, kind: str
) -> None:
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    tables = summarizers(port, "refuse", key_file=str(folder / "key"))
    reminder = user("<system-reminder>kept</system-reminder>")
    async with start(summarizers=tables) as daemon, daemon.connect() as peer:
        await begin(peer)
        await peer.call("session.append", session_id="a", items=[reminder, user("recent " * 50)])
        before = await look(peer)
        answer = await peer.answer(
            await peer.ask(
                "session.compact",
                session_id="a",
                summarizer=kind,
                keep_recent_tokens=200,
                dry_run=True,
            )
        )
        assert KEY not in json.dumps(answer)
        result = answer["result"]
        assert (result["operation_id"], result["status"]) == (None, "planned")
        plan = result["plan"]
        parts = ("instructions", "reminders", "summarised", "tail", "dropped")
        assert [plan[part]["entry_ids"] for part in parts] == [[1], [4], [2, 3], [5], []]
        assert plan["summarised"]["tokens"]["count"] > plan["tail"]["tokens"]["count"] > 0
        if kind == "offline":
            assert plan["request"] is None
        else:
            assert plan["request"]["provider"] == kind
            assert plan["request"]["body"]["model"] == "m"
            sent = json.dumps(plan["request"]["body"])
            assert "why does the build fail?" in sent
            assert "recent recent" not in sent
        assert await look(peer) == before
        events = await peer.call("session.events", session_id="a", since=0)
        assert "compaction.started" not in {event["method"] for event in events["events"]}


async def test_a_dry_run_fails_as_the_real_one_would(peer: Peer) -> None:
    await peer.call("session.create", session_id="a", items=HISTORY[:1])
    with pytest.raises(NothingToCompact):
        await peer.call("session.compact", session_id="a", dry_run=True)
    with pytest.raises(Conflict):
        await peer.call("session.compact", session_id="a", dry_run=True, expected_revision=7)
    with pytest.raises(NotFound):
        await peer.call("session.compact", session_id="b", dry_run=True)


async def test_reminders_that_leave_no_room_can_be_folded_into_the_summary(start: Start) -> None:
    """`result_too_large` by default; the oldest go first, and their text into the summary."""
    notes = [
        user(f"<system-reminder>note-{number} {'word ' * 500}</system-reminder>")
        for number in range(8)
    ]
    async with start(context_limit=4000) as daemon, daemon.connect() as peer:
        await peer.call("session.create", session_id="a", items=[*notes, user("hello")])
        with pytest.raises(ResultTooLarge):
            await peer.call("session.compact", session_id="a")
        await peer.call("session.compact", session_id="a", fold_reminders=True)
        entries = await peer.entries("a")
        assert [entry["id"] for entry in entries][:-1] == [4, 5, 6, 7, 8]
        assert "note-0" in json.dumps(entries[-1])
