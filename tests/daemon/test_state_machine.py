"""A daemon beside a model: whatever is asked of it in whatever order, both have the same.

The steps are drawn in a thread; the daemon, its clients and a model provider run in the loop of the
test.
"""

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import anyio
import anyio.abc
import anyio.from_thread
import anyio.to_thread
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.daemon.conftest import WAIT_S, Daemon
from tests.daemon.model import Kept, Line, Model, Told
from tests.provider_stub import SUMMARY, Exchange, answer, refuse, serving

from recapd.protocol import messages as m
from recapd.protocol.client import RESET, Client, connect
from recapd.protocol.errors import CompactionFailed, NotFound, RpcError

Start = Callable[..., AbstractAsyncContextManager[Daemon]]

LONG: Final = os.environ.get("RECAPD_LONG") == "1"
SESSIONS: Final = ("a", "b", "c")
GIVEN: Final = "What was given as the summary."


class World:
    """A store, the daemon that serves it, a client, and all that was told to it."""

    def __init__(self, start: Start, folder: Path, tasks: anyio.abc.TaskGroup, port: int) -> None:
        self.start = start
        self.folder = folder
        self.tasks = tasks
        self.heard: dict[str, list[Told]] = {}
        self.client: Client
        self._port = port
        self._more = anyio.Event()
        self._stop = anyio.Event()
        self._stopped = anyio.Event()
        self._leave: anyio.CancelScope
        self._left = anyio.Event()

    async def open(self) -> None:
        await self.tasks.start(self._serve)
        await self.tasks.start(self._listen)

    async def close(self) -> None:
        self._leave.cancel()
        await self._left.wait()
        await self.stop()
        shutil.rmtree(self.folder / "data")

    async def stop(self) -> None:
        self._stop.set()
        await self._stopped.wait()

    async def restart(self) -> None:
        await self.stop()
        await self.tasks.start(self._serve)

    async def _serve(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        self._stop, self._stopped = anyio.Event(), anyio.Event()
        plays = {"responses": "answer", "chat": "refuse", "anthropic": "hold"}
        tables = {
            kind: {"model": "m", "base_url": f"http://127.0.0.1:{self._port}/{play}/v1"}
            for kind, play in plays.items()
        }
        async with self.start(summarizers=tables):
            task_status.started()
            await self._stop.wait()
        self._stopped.set()

    async def _listen(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.CancelScope() as self._leave:
            async with (
                connect(self.folder / "rpc.sock") as self.client,
                self.client.subscribe(since="start") as notices,
            ):
                task_status.started()
                async for notice in notices:
                    assert notice.method != RESET
                    if notice.seq is not None and notice.session_id is not None:
                        told = told_by(notice.method, notice.params)
                        self.heard.setdefault(notice.session_id, []).append(told)
                        self._more.set()
                        self._more = anyio.Event()
        self._left.set()

    async def hear(self, model: Model) -> None:
        """Until as much was told as there is; it is all that there is, once each, and in order."""
        with anyio.fail_after(WAIT_S):
            while sum(map(len, self.heard.values())) < sum(map(len, model.told.values())):
                await self._more.wait()
        assert self.heard == model.told

    async def call(self, method: str, params: dict[str, Any]) -> Any:
        """The result, or the error as it came, where it is of the protocol."""
        try:
            return msgspec.json.decode(await self.client.call(method, params))
        except RpcError as error:
            return {"error": error.to_wire()}

    async def lines(self, session_id: str, revision: int | None = None) -> list[Line]:
        return [
            (entry.id, bytes(entry.item))
            async for entry in self.client.pages(session_id, revision=revision, limit=3)
        ]

    async def check(self, session_id: str, kept: Kept) -> None:
        """The session, all its histories byte for byte, and no archive more."""
        got = await self.client.request("session.get", m.GetParams(session_id=session_id))
        found = got.session
        assert (found.revision, found.generation) == (kept.revision, kept.generation)
        assert found.archived_revisions == tuple(sorted(kept.archives, reverse=True))
        assert (found.entries, found.busy) == (len(kept.history), False)
        assert await self.lines(session_id) == kept.history
        for revision, history in kept.archives.items():
            assert await self.lines(session_id, revision) == history

    async def check_log(self, session_id: str, log: list[Told]) -> None:
        params = m.EventsParams(session_id=session_id, since=max(0, log[0].seq - 1))
        events = (await self.client.request("session.events", params)).events
        assert [told_by(msgspec.json.decode(e)["method"], e) for e in events] == log

    async def check_files(self, archives: int) -> None:
        found = [path for path in (self.folder / "data" / "archives").rglob("*") if path.is_file()]
        assert len(found) == archives

    async def resume(self, session_id: str, since: int, log: list[Told]) -> bool:
        """A new client that goes on behind `since`; whether it had to be told to start anew."""
        with anyio.fail_after(WAIT_S):
            async with (
                connect(self.folder / "rpc.sock") as client,
                client.subscribe(session_id, since=since) as notices,
            ):
                missed = [told for told in log if told.seq > since]
                if 0 < since < log[0].seq - 1:  # 0: it has seen nothing, so it misses nothing
                    notice = await anext(notices)
                    assert notice.method == RESET
                    return True
                for told in missed:
                    notice = await anext(notices)
                    assert told_by(notice.method, notice.params) == told
                return False


def told_by(method: str, params: msgspec.Raw) -> Told:
    event = msgspec.json.decode(params)
    assert event["prev_seq"] == event["seq"] - 1
    return Told(
        event["seq"], method, event["revision"], event["generation"], event.get("operation_id")
    )


class Provider:
    """A model that answers, refuses, or holds an answer back, by the path that it is asked at."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.go = anyio.Event()

    async def play(self, exchange: Exchange) -> None:
        match exchange.path.split("/")[1]:
            case "answer":
                await answer(exchange)
            case "refuse":
                await refuse(exchange)
            case _:
                self.asked.set()
                await self.go.wait()
                await answer(exchange)


texts = st.text(max_size=20) | st.sampled_from(["", "\U0001f642", "word " * 30, "more " * 40])
roles = st.sampled_from(["user", "user", "assistant", "system"])


@st.composite
def items(draw: st.DrawFn) -> bytes:
    """Written as no encoder writes it, for it must come back as it was written."""
    role, text, gap = draw(roles), draw(texts), draw(st.sampled_from(["", " ", "\t"]))
    written = msgspec.json.encode(text).decode()
    return f'{{"role":{gap}"{role}" , "content":{written},"n":1.0{gap}}}'.encode()


class Machine(RuleBasedStateMachine):
    """Each rule asks the daemon, tells the model what was acknowledged, and compares the answer."""

    operations = Bundle("operations")

    def __init__(self, open_world: Callable[[], World], provider: Provider) -> None:
        super().__init__()
        self.model = Model()
        self.provider = provider
        self.numbers = itertools.count(1)
        self.seen: dict[str, int] = {}  # by session, the last seq of the client that comes back
        self.receipts: dict[str, tuple[str, dict[str, Any], Any]] = {}
        self.touched: set[str] = set()
        self.world = open_world()
        anyio.from_thread.run(self.world.open)

    def teardown(self) -> None:
        anyio.from_thread.run(self.world.close)

    # What rules share.

    def ask(self, method: str, **params: Any) -> tuple[str, Any]:
        """A change under a new operation id, which may be asked for again later; its result."""
        operation_id = f"op-{next(self.numbers)}"
        params["operation_id"] = operation_id
        result = anyio.from_thread.run(self.world.call, method, params)
        self.receipts[operation_id] = method, params, result
        self.touched.add(params["session_id"])
        return operation_id, result

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.model.sessions)), "session")

    def accept(self, result: Any, session_id: str) -> None:
        """The session as it is in the answer is the one of the model."""
        assert "error" not in result, result
        kept, session = self.model.sessions[session_id], result["session"]
        assert (session["revision"], session["generation"]) == (kept.revision, kept.generation)
        assert session["entries"] == len(kept.history)

    def accept_compaction(
        self, session_id: str, operation_id: str, saw: list[Line], result: Any, summary: str
    ) -> None:
        assert "error" not in result, result
        before = self.model.sessions[session_id].revision
        lines = anyio.from_thread.run(self.world.lines, session_id)
        reminders = dict(line for line in lines if line[0] == result["reminder_entry_id"])
        (reminder,) = reminders.values()
        assert summary in msgspec.json.decode(reminder)["content"][0]["text"]
        kept = self.model.sessions[session_id]
        carried = len(kept.history) - len(saw)
        self.model.compact(session_id, saw, reminder, operation_id)
        self.accept(result, session_id)
        assert (result["archived_revision"], result["carried_over"]) == (before, carried)

    # Rules.

    @initialize(data=st.data(), first=st.lists(items(), max_size=4))
    def begin(self, data: st.DataObject, first: list[bytes]) -> None:
        self.create(data, first)

    @precondition(lambda self: len(self.model.sessions) < len(SESSIONS))
    @rule(target=operations, data=st.data(), first=st.lists(items(), max_size=4))
    def create(self, data: st.DataObject, first: list[bytes]) -> str:
        free = [name for name in SESSIONS if name not in self.model.sessions]
        session_id = data.draw(st.sampled_from(free), "new session")
        raw = [msgspec.Raw(item) for item in first]
        operation_id, result = self.ask("session.create", session_id=session_id, items=raw)
        self.model.create(session_id, first, operation_id)
        self.accept(result, session_id)
        return operation_id

    @precondition(lambda self: self.model.sessions)
    @rule(target=operations, data=st.data(), new=st.lists(items(), min_size=1, max_size=5))
    def append(self, data: st.DataObject, new: list[bytes]) -> str:
        session_id = self.pick(data)
        raw = [msgspec.Raw(item) for item in new]
        operation_id, result = self.ask("session.append", session_id=session_id, items=raw)
        ids = self.model.append(session_id, new, operation_id)
        self.accept(result, session_id)
        assert result["entry_ids"] == ids
        return operation_id

    def compactable(self) -> list[str]:
        return sorted(name for name, kept in self.model.sessions.items() if kept.compactable)

    def long(self) -> list[str]:
        return sorted(name for name, kept in self.model.sessions.items() if kept.long)

    @precondition(lambda self: self.compactable())
    @rule(target=operations, data=st.data(), by=st.sampled_from(["offline", "given", "responses"]))
    def compact(self, data: st.DataObject, by: str) -> str:
        session_id = data.draw(st.sampled_from(self.compactable()), "session")
        if by == "responses" and not self.model.sessions[session_id].long:
            by = "given"
        how = {"summary": GIVEN} if by == "given" else {"summarizer": by}
        operation_id, result = self.ask("session.compact", session_id=session_id, **how)
        saw = self.model.begin(session_id, operation_id)
        summary = {"given": GIVEN, "responses": SUMMARY, "offline": ""}[by]
        self.accept_compaction(session_id, operation_id, saw, result, summary)
        return operation_id

    @precondition(lambda self: self.compactable())
    @rule(target=operations, data=st.data())
    def compact_with_a_model_that_fails(self, data: st.DataObject) -> str:
        session_id = data.draw(st.sampled_from(self.compactable()), "session")
        operation_id, result = self.ask("session.compact", session_id=session_id, summarizer="chat")
        assert result["error"]["code"] == CompactionFailed.code
        self.model.begin(session_id, operation_id)
        self.model.end(session_id, operation_id)
        return operation_id

    @precondition(lambda self: self.long())
    @rule(
        target=operations,
        data=st.data(),
        meanwhile=st.lists(items(), min_size=1, max_size=2),
        end=st.sampled_from(["answer", "cancel", "restart", "delete"]),
    )
    def compact_with_a_model_that_is_slow(
        self, data: st.DataObject, meanwhile: list[bytes], end: str
    ) -> Any:
        """Items are appended meanwhile; then it is answered, or ends in another way."""
        session_id = data.draw(st.sampled_from(self.long()), "session")
        self.provider.asked, self.provider.go = anyio.Event(), anyio.Event()
        how = {"summarizer": "anthropic", "wait": False}
        slow, _ = self.ask("session.compact", session_id=session_id, **how)
        del self.receipts[slow]  # what it answered is not how it ended
        saw = self.model.begin(session_id, slow)
        anyio.from_thread.run(self.provider.asked.wait)
        raw = [msgspec.Raw(item) for item in meanwhile]
        operation_id, result = self.ask("session.append", session_id=session_id, items=raw)
        self.model.append(session_id, meanwhile, operation_id)
        self.accept(result, session_id)
        if end == "cancel":
            asked: dict[str, Any] = {"operation_id": slow}
            assert anyio.from_thread.run(self.world.call, "operation.cancel", asked)["cancelled"]
        elif end == "restart":
            anyio.from_thread.run(self.world.restart)
        elif end == "delete":
            self._delete(session_id, slow)
        else:
            self.provider.go.set()
        ended = anyio.from_thread.run(
            self.world.call, "operation.get", {"operation_id": slow, "wait_ms": 60_000}
        )["operation"]
        if end == "answer":
            assert ended["status"] == "completed"
            self.accept_compaction(session_id, slow, saw, ended["result"], SUMMARY)
        else:
            assert ended["status"] in ("cancelled", "failed")
            if end != "delete":
                self.model.end(session_id, slow)
        nothing = cast("Any", multiple())
        return nothing if end == "delete" else operation_id

    @precondition(lambda self: self.model.sessions)
    @rule(target=operations, data=st.data())
    def restore(self, data: st.DataObject) -> str:
        session_id = self.pick(data)
        kept = self.model.sessions[session_id]
        revision = data.draw(st.sampled_from([*sorted(kept.archives), kept.revision]), "revision")
        operation_id, result = self.ask("session.restore", session_id=session_id, revision=revision)
        before = kept.revision
        changed = self.model.restore(session_id, revision, operation_id)
        self.accept(result, session_id)
        assert result["archived_revision"] == (before if changed else None)
        return operation_id

    @precondition(lambda self: self.model.sessions)
    @rule(target=operations, data=st.data())
    def rewind(self, data: st.DataObject) -> str:
        session_id = self.pick(data)
        kept = self.model.sessions[session_id]
        after = data.draw(st.sampled_from([0, *(id for id, _ in kept.history)]), "after")
        operation_id, result = self.ask(
            "session.rewind", session_id=session_id, after_entry_id=after
        )
        before = kept.revision
        changed = self.model.rewind(session_id, after, operation_id)
        self.accept(result, session_id)
        assert result["archived_revision"] == (before if changed else None)
        return operation_id

    @precondition(lambda self: 0 < len(self.model.sessions) < len(SESSIONS))
    @rule(target=operations, data=st.data())
    def fork(self, data: st.DataObject) -> str:
        source = self.pick(data)
        kept = self.model.sessions[source]
        revision = data.draw(st.sampled_from([*sorted(kept.archives), kept.revision]), "revision")
        ids = [id for id, _ in kept.of(revision)]
        after = data.draw(st.sampled_from([None, 0, *ids]), "after")
        free = [name for name in SESSIONS if name not in self.model.sessions]
        new = data.draw(st.sampled_from(free), "new session")
        operation_id, result = self.ask(
            "session.fork",
            session_id=source,
            new_session_id=new,
            revision=revision,
            after_entry_id=after,
        )
        self.model.fork(source, revision, after, new, operation_id)
        self.accept(result, new)
        self.touched.add(new)
        return operation_id

    @rule(target=operations, session_id=st.sampled_from(SESSIONS))
    def delete(self, session_id: str) -> str:
        return self._delete(session_id, None)

    def _delete(self, session_id: str, running: str | None) -> str:
        if running is not None:
            self.model.end(session_id, running)
        operation_id, result = self.ask("session.delete", session_id=session_id)
        assert result == {"deleted": self.model.delete(session_id, operation_id)}
        return operation_id

    @rule()
    def restart(self) -> None:
        anyio.from_thread.run(self.world.restart)
        self.touched.update(SESSIONS)

    @rule(operation_id=operations)
    def repeat(self, operation_id: str) -> None:
        """PROTOCOL.md §2: the same id and parameters again give what was recorded."""
        method, params, first = self.receipts[operation_id]
        again = anyio.from_thread.run(self.world.call, method, params)
        assert again == (first if "error" in first else {**first, "replayed": True})
        self.touched.add(params["session_id"])

    @precondition(lambda self: self.model.sessions)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        """A client with the last seq it saw: what it missed, or the word that it cannot be told."""
        session_id = self.pick(data)
        log = self.model.log(session_id)
        since = self.seen.get(session_id, 0)
        reset = anyio.from_thread.run(self.world.resume, session_id, since, log)
        assert not reset or session_id in self.model.deleted_at
        self.seen[session_id] = self.model.seq(session_id)

    @invariant()
    def both_have_the_same(self) -> None:
        anyio.from_thread.run(self.world.hear, self.model)
        archives = sum(len(kept.archives) for kept in self.model.sessions.values())
        anyio.from_thread.run(self.world.check_files, archives)
        for session_id in sorted(self.touched):
            if session_id in self.model.sessions:
                kept = self.model.sessions[session_id]
                anyio.from_thread.run(self.world.check, session_id, kept)
                anyio.from_thread.run(self.world.check_log, session_id, self.model.log(session_id))
            else:
                asked = {"session_id": session_id}
                got = anyio.from_thread.run(self.world.call, "session.get", asked)
                assert got["error"]["code"] == NotFound.code
        self.touched.clear()


async def run(start: Start, folder: Path, examples: int, steps: int) -> None:
    provider = Provider()
    async with serving(provider.play) as stub, anyio.create_task_group() as tasks:
        open_world = partial(World, start, folder, tasks, stub.port)
        bounds = settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
            phases=[Phase.generate, Phase.shrink] if LONG else [Phase.generate],
        )

        class Here(Machine):
            """The machine in this loop; Hypothesis makes one for each program."""

            def __init__(self) -> None:
                super().__init__(open_world, provider)

        await anyio.to_thread.run_sync(partial(run_state_machine_as_test, Here, settings=bounds))


@pytest.mark.promise("D1", "D2", "D8")
async def test_a_daemon_has_what_the_model_has(start: Start, folder: Path) -> None:
    """DESIGN.md promises 1 to 4: what was acknowledged is there, byte for byte, and no more."""
    await run(start, folder, examples=25, steps=25)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.promise("D1", "D2", "D8")
async def test_a_daemon_has_what_the_model_has_for_long(start: Start, folder: Path) -> None:
    """The same with more and longer programs."""
    await run(start, folder, examples=400, steps=60)
