"""kill -9 under a mixed load, again and again on one store, beside a model outside the daemon."""

import random
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
from tests.daemon.model import Line, Model, Told
from tests.e2e.conftest import Process, Spawn

from recapd.protocol import messages as m
from recapd.protocol.client import Client, ConnectionLost, NotConnected
from recapd.protocol.errors import NotFound
from recapd.protocol.subscription import Since

SESSIONS: Final = ("a", "b", "c")
CHANGES_MAX: Final = 12  # acknowledged in a round, until the kill
SAMPLE: Final = 3  # archives of a session that are read after each round; in the end all are


class Worker:
    """Changes one session, one change after the other; remembers what is under way."""

    def __init__(self, name: str, model: Model, random_: random.Random) -> None:
        self.name = name
        self.model = model
        self.heard: list[Told] = []
        self.recovered: dict[str, int] = {"made": 0, "not made": 0}
        self._random = random_
        self._number = 0
        self._under_way: tuple[str, dict[str, Any]] | None = None
        self._acknowledged = False

    @property
    def _fork(self) -> str:
        return f"{self.name}.fork"

    def _choose(self) -> tuple[str, dict[str, Any]]:
        kept = self.model.sessions[self.name]
        kinds = ["append"] * 4 + ["compact"] * (3 if kept.compactable else 0)
        kinds += ["restore", "rewind"] if kept.archives else []
        kinds.append("delete" if self._fork in self.model.sessions else "fork")
        kind = self._random.choice(kinds)
        self._number += 1
        params: dict[str, Any] = {"session_id": self.name}
        match kind:
            case "append":
                texts = [f"{self.name} {self._number} {n} " + "word " * 20 for n in range(3)]
                params["items"] = [{"role": "user", "content": text} for text in texts]
            case "restore":
                params["revision"] = self._random.choice(sorted(kept.archives))
            case "rewind":
                params["after_entry_id"] = self._random.choice([0, *(i for i, _ in kept.history)])
            case "fork":
                params["new_session_id"] = self._fork
                params["revision"] = self._random.choice([kept.revision, *sorted(kept.archives)])
            case "delete":
                params["session_id"] = self._fork
            case _:
                pass
        return f"session.{kind}", {**params, "operation_id": f"{self.name}-{self._number}"}

    async def create(self, client: Client) -> None:
        params = {"session_id": self.name, "operation_id": self.name}
        await client.call("session.create", params)
        self.model.create(self.name, [], self.name)

    async def work(self, process: Process, done: anyio.abc.ObjectSendStream[None]) -> None:
        with suppress(ConnectionLost, NotConnected):
            async with process.connect() as client:
                while True:
                    method, params = self._under_way = self._choose()
                    await client.call(method, params)
                    self._acknowledged = True
                    await self._settle(client)
                    await done.send(None)

    async def listen(self, process: Process, listening: anyio.abc.ObjectSendStream[None]) -> None:
        """Goes on behind the last event that was heard before the kill."""
        with suppress(ConnectionLost, NotConnected):
            since: Since = self.heard[-1].seq if self.heard else "start"
            async with (
                process.connect() as client,
                client.subscribe(self.name, since=since) as notices,
            ):
                await listening.send(None)
                async for notice in notices:
                    if notice.seq is not None:
                        event: dict[str, Any] = msgspec.json.decode(notice.params)
                        self.heard.append(told_by({**event, "method": notice.method}))

    async def recover(self, client: Client) -> None:
        """What was under way was made, or was not, and says so; repeated, it is made once."""
        if self._under_way is None:
            return
        method, params = self._under_way
        asked = m.OperationGetParams(operation_id=params["operation_id"])
        try:
            operation = (await client.request("operation.get", asked)).operation
        except NotFound:
            status = "unknown"
        else:
            status = operation.status
        assert not self._acknowledged or status == "completed", "it was acknowledged"
        if not self._acknowledged:
            self.recovered["made" if status == "completed" else "not made"] += 1
        if status == "completed":
            await self._settle(client)
            again = msgspec.json.decode(await client.call(method, params))
            assert again["replayed"] is True
        elif status == "failed":
            assert method == "session.compact"
            self.model.begin(self.name, params["operation_id"])
            self.model.end(self.name, params["operation_id"])
            self._under_way = None
        else:
            assert status == "unknown"
            assert "replayed" not in msgspec.json.decode(await client.call(method, params))
            await self._settle(client)

    async def _settle(self, client: Client) -> None:
        """Tell the model of what was made."""
        assert self._under_way is not None
        method, params = self._under_way
        operation_id = params["operation_id"]
        model = self.model
        match method:
            case "session.append":
                items = [msgspec.json.encode(item) for item in params["items"]]
                model.append(self.name, items, operation_id)
            case "session.compact":
                reminder_id = model.sessions[self.name].next_entry_id
                reminder = dict(await lines(client, self.name))[reminder_id]
                saw = model.begin(self.name, operation_id)
                model.compact(self.name, saw, reminder, operation_id)
            case "session.restore":
                model.restore(self.name, params["revision"], operation_id)
            case "session.rewind":
                model.rewind(self.name, params["after_entry_id"], operation_id)
            case "session.fork":
                model.fork(self.name, params["revision"], None, self._fork, operation_id)
            case _:
                model.delete(self._fork, operation_id)
        self._under_way, self._acknowledged = None, False

    async def check(self, client: Client, *, everything: bool) -> None:
        """The session and its fork are what the model says, and so is what was told."""
        assert self.heard == self.model.told[self.name][: len(self.heard)]
        for name in (self.name, self._fork):
            if name not in self.model.sessions:
                with pytest.raises(NotFound):
                    await lines(client, name)
                continue
            kept = self.model.sessions[name]
            got = await client.request("session.get", m.GetParams(session_id=name, limit=1))
            session = got.session
            assert (session.revision, session.generation) == (kept.revision, kept.generation)
            assert session.archived_revisions == tuple(sorted(kept.archives, reverse=True))
            assert not session.busy
            assert await lines(client, name) == kept.history
            archives = sorted(kept.archives)
            if not everything and len(archives) > SAMPLE:
                archives = [*self._random.sample(archives[:-1], SAMPLE - 1), archives[-1]]
            for revision in archives:
                assert await lines(client, name, revision) == kept.archives[revision]
            told = await log(client, name)
            assert told[-1:] == self.model.log(name)[-1:]
            if name == self.name:
                assert told == self.model.told[name]


def told_by(event: dict[str, Any]) -> Told:
    assert event["prev_seq"] == event["seq"] - 1
    place = event["seq"], event["method"], event["revision"], event["generation"]
    return Told(*place, event.get("operation_id"))


async def log(client: Client, session_id: str) -> list[Told]:
    told: list[Told] = []
    page = [b""]
    while page:
        since = told[-1].seq if told else 0
        params = m.EventsParams(session_id=session_id, since=since, limit=100_000)
        page = [bytes(event) for event in (await client.request("session.events", params)).events]
        told += [told_by(msgspec.json.decode(event)) for event in page]
    return told


async def lines(client: Client, session_id: str, revision: int | None = None) -> list[Line]:
    pages = client.pages(session_id, revision=revision)
    return [(entry.id, bytes(entry.item)) async for entry in pages]


async def kill_again_and_again(spawn: Spawn, folder: Path, rounds: int, seed: int) -> None:
    random_ = random.Random(seed)
    model = Model()
    workers = [Worker(name, model, random_) for name in SESSIONS]
    for turn in range(rounds + 1):
        process = spawn()
        assert await process.ready(), process.said()
        async with process.connect() as client:
            for worker in workers:
                if turn == 0:
                    await worker.create(client)
                await worker.recover(client)
            for worker in workers:
                await worker.check(client, everything=turn == rounds)
            files = [path for path in (folder / "data" / "archives").rglob("*") if path.is_file()]
            assert len(files) == sum(len(kept.archives) for kept in model.sessions.values())
            if turn == rounds:
                break
            done, changes = anyio.create_memory_object_stream[None](CHANGES_MAX * 2)
            async with anyio.create_task_group() as tasks, done, changes:
                for worker in workers:
                    tasks.start_soon(worker.listen, process, done)
                for _ in workers:
                    await changes.receive()
                for worker in workers:
                    tasks.start_soon(worker.work, process, done)
                for _ in range(random_.randrange(CHANGES_MAX)):
                    await changes.receive()
                for _ in range(random_.randrange(6)):
                    await client.request("protocol.ping")
                await process.kill()
                tasks.cancel_scope.cancel()
    made = sum(worker.recovered["made"] for worker in workers)
    missing = sum(worker.recovered["not made"] for worker in workers)
    assert made > 0, "no kill fell between a commit and its answer"
    assert missing > 0, "no kill fell before a commit"
    methods = {told.method for log in model.told.values() for told in log}
    assert {"history.appended", "history.replaced", "session.deleted"} <= methods


@pytest.mark.promise("D8", "F6", "D1", "D2")
async def test_fifty_kills_under_a_mixed_load_lose_nothing(spawn: Spawn, folder: Path) -> None:
    """PROMISES.md F6, D8: what was acknowledged is there, what was under way is whole or not."""
    await kill_again_and_again(spawn, folder, rounds=50, seed=5)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.promise("D8", "F6", "D1", "D2")
async def test_five_hundred_kills_under_a_mixed_load_lose_nothing(
    spawn: Spawn, folder: Path
) -> None:
    """The same with ten times as many."""
    await kill_again_and_again(spawn, folder, rounds=500, seed=500)
