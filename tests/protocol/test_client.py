"""What a client promises whatever happens to its connection (PROTOCOL.md §1, §4; `client.py`)."""

import json
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args, get_overloads, get_type_hints

import anyio
import anyio.abc
import msgspec
import pytest

from recapd.protocol import messages as m
from recapd.protocol.client import (
    RESET,
    BadAnswer,
    Client,
    ConnectionLost,
    NotConnected,
    Notice,
    Patience,
    Subscription,
    connect,
)
from recapd.protocol.errors import (
    FrameTooLarge,
    InvalidRequest,
    ItemTooLarge,
    NotFound,
    OutcomeUnknown,
    Overloaded,
    ParseError,
    RpcError,
    ShuttingDown,
    UnsupportedProtocol,
)
from recapd.protocol.framing import Framer, Framing
from recapd.protocol.messages import InitializeResult, Limits, Principal, ServerInfo
from recapd.protocol.methods import METHODS

Message = dict[str, Any]

LIMITS = Limits(
    frame_bytes=1 << 20,
    batch=128,
    in_flight=64,
    depth=128,
    connections=256,
    subscriptions=256,
    items_per_append=1000,
    item_bytes=(1 << 20) - (1 << 14),
)


class Peer:
    """One connection, as the server sees it. What it sends goes out `piece_bytes` at a time."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self.stream = stream
        self.piece_bytes = 1 << 20
        self._framer = Framer()
        self._frames: list[bytes] = []

    async def next_frame(self) -> bytes:
        while not self._frames:
            self._frames += self._framer.receive(await self.stream.receive())
        return self._frames.pop(0)

    async def next_message(self) -> Message:
        message: Message = json.loads(await self.next_frame())
        return message

    async def expect(self, method: str) -> Message:
        """The next request, which is for `method`."""
        message = await self.next_message()
        assert message["method"] == method
        return message

    async def send(self, *messages: Message) -> None:
        """Send all of them with one write."""
        data = b"".join(self._framer.encode(json.dumps(message).encode()) for message in messages)
        await self.send_bytes(data)

    async def send_bytes(self, data: bytes) -> None:
        for start in range(0, len(data), self.piece_bytes):
            await self.stream.send(data[start : start + self.piece_bytes])

    async def answer(self, request: Message, result: object) -> None:
        await self.send(answer_to(request, result))

    async def refuse(self, request: Message, error: RpcError) -> None:
        await self.send({"jsonrpc": "2.0", "id": request["id"], "error": error.to_wire()})

    async def close(self) -> None:
        await self.stream.aclose()


def answer_to(request: Message, result: object) -> Message:
    return {"jsonrpc": "2.0", "id": request["id"], "result": msgspec.to_builtins(result)}


def notification(method: str, **params: object) -> Message:
    return {"jsonrpc": "2.0", "method": method, "params": params}


class FakeServer:
    """Listens at `path` between `start` and `stop`, and shakes hands by itself with `hello`."""

    def __init__(self, path: Path, tasks: anyio.abc.TaskGroup, limits: Limits) -> None:
        self.path = path
        self.store_id = "store"
        self.limits = limits
        self.handshakes: list[Message] = []
        self.answers_handshake: Callable[[Peer, Message], Awaitable[None]] = self._welcome
        self._tasks = tasks
        self._peers: list[Peer] = []
        self._scope = anyio.CancelScope()
        self._send, self._receive = anyio.create_memory_object_stream[Peer](100)

    @property
    def hello(self) -> InitializeResult:
        server = ServerInfo("recapd", "0", "instance", self.store_id, 1)
        return InitializeResult(1, server, self.limits, Principal(0, ()), "")

    async def start(self) -> None:
        await self._tasks.start(self._listen)

    async def stop(self) -> None:
        """Listen no more; connections stay."""
        self._scope.cancel()
        self.path.unlink()

    async def accept(self) -> Peer:
        """The next connection after its handshake."""
        return await self._receive.receive()

    async def close(self) -> None:
        for peer in self._peers:
            await anyio.aclose_forcefully(peer.stream)
        self._send.close()
        self._receive.close()

    async def _listen(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.CancelScope() as self._scope:
            async with await anyio.create_unix_listener(self.path) as listener:
                task_status.started()
                await listener.serve(self._shake_hands, self._tasks)

    async def _shake_hands(self, stream: anyio.abc.ByteStream) -> None:
        peer = Peer(stream)
        self._peers.append(peer)
        message = await peer.next_message()
        self.handshakes.append(message)
        await self.answers_handshake(peer, message)

    async def _welcome(self, peer: Peer, message: Message) -> None:
        await peer.answer(message, self.hello)
        self._send.send_nowait(peer)


@asynccontextmanager
async def fake_server(limits: Limits = LIMITS) -> AsyncGenerator[FakeServer]:
    """A listening server for the block, which may take ten seconds."""
    # Not tmp_path: a socket's path has 107 bytes at most.
    folder = Path(tempfile.mkdtemp(prefix="recapd-"))
    try:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                server = FakeServer(folder / "s", tasks, limits)
                await server.start()
                try:
                    yield server
                finally:
                    await server.close()
                    tasks.cancel_scope.cancel()
    finally:
        shutil.rmtree(folder)


QUICK = Patience(total_s=5, pause_s=0.001, pause_max_s=0.01)

PONG = {"now": "2026-12-01T10:00:00.000Z"}

SESSION = m.Session(
    session_id="s",
    title=None,
    cwd=None,
    labels={},
    created_at="2026-12-01T10:00:00.000Z",
    updated_at="2026-12-01T10:00:00.000Z",
    revision=1,
    generation=0,
    entries=1,
    tokens=m.Tokens(1, "bytes/4", False),
    archived_revisions=(),
    durability="durable",
    state="active",
    parent=None,
    busy=False,
)


def appended(revision: int = 1) -> m.AppendResult:
    return m.AppendResult(msgspec.structs.replace(SESSION, revision=revision), [1], [])


def append_params(item: bytes = b'{"role":"user"}') -> m.AppendParams:
    return m.AppendParams(session_id="s", items=[msgspec.Raw(item)])


class Outcome:
    """How a call ended that runs beside the test."""

    def __init__(
        self, tasks: anyio.abc.TaskGroup, function: Callable[..., Awaitable[Any]], *args: Any
    ) -> None:
        self.scope = anyio.CancelScope()
        self._done = anyio.Event()
        self._result: Any = None
        self._error: Exception | None = None
        tasks.start_soon(self._run, function, args)

    async def _run(self, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> None:
        try:
            with self.scope:
                self._result = await function(*args)
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    async def result(self) -> Any:
        await self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Bench(msgspec.Struct, frozen=True):
    """A client of a fake server, the far end of its first connection, and a place for calls."""

    server: FakeServer
    client: Client
    peer: Peer
    tasks: anyio.abc.TaskGroup

    def begin(self, function: Callable[..., Awaitable[Any]], *args: Any) -> Outcome:
        return Outcome(self.tasks, function, *args)


@asynccontextmanager
async def bench(limits: Limits = LIMITS, **options: Any) -> AsyncGenerator[Bench]:
    options = {"patience": QUICK} | options
    async with (
        fake_server(limits) as server,
        connect(server.path, **options) as client,
        anyio.create_task_group() as tasks,
    ):
        yield Bench(server, client, await server.accept(), tasks)


# Requests.


def test_every_method_of_the_table_has_its_types() -> None:
    typed = {
        get_args(hints["method"])[0]: (hints["params"], hints["return"])
        for hints in map(get_type_hints, get_overloads(Client.request))
    }
    for name, method in METHODS.items():
        if name in ("protocol.initialize", "session.subscribe", "session.unsubscribe"):
            continue  # the client's own business
        if name == "rpc.discover":
            continue  # a document, to be had with `call`
        params, result = typed.pop(name)
        assert method.params in (params, *get_args(params))
        assert result is method.result
    assert not typed


async def test_a_request_has_typed_parameters_and_a_typed_result() -> None:
    async with bench(name="a program", version="7") as on:
        hello = on.server.handshakes[0]
        assert hello["method"] == "protocol.initialize"
        assert hello["params"]["client"] == {"name": "a program", "version": "7"}
        call = on.begin(on.client.request, "session.list", m.ListParams(limit=3))
        request = await on.peer.expect("session.list")
        assert request["params"]["limit"] == 3
        await on.peer.answer(request, m.ListResult([SESSION], "c"))
        assert await call.result() == m.ListResult([SESSION], "c")


async def test_answers_may_come_in_any_order() -> None:
    async with bench() as on:
        first = on.begin(on.client.call, "protocol.ping")
        request_1 = await on.peer.expect("protocol.ping")
        second = on.begin(on.client.call, "server.info")
        request_2 = await on.peer.expect("server.info")
        await on.peer.answer(request_2, 2)
        assert await second.result() == msgspec.Raw(b"2")
        await on.peer.answer(request_1, 1)
        assert await first.result() == msgspec.Raw(b"1")


@pytest.mark.parametrize("framing", get_args(Framing))
async def test_an_answer_may_come_byte_by_byte(framing: Framing) -> None:
    async with bench(framing=framing) as on:
        call = on.begin(on.client.call, "rpc.discover")
        request = await on.peer.expect("rpc.discover")
        on.peer.piece_bytes = 1
        await on.peer.answer(request, "a\u2028b\nc")
        assert msgspec.json.decode(await call.result()) == "a\u2028b\nc"


async def test_items_and_results_stay_the_bytes_that_they_are() -> None:
    item = b'{"b": 1.0, "a":123456789012345678901234567890, "a":"\\u00e9"}'
    async with bench() as on:
        call = on.begin(on.client.call, "session.append", append_params(item))
        frame = await on.peer.next_frame()
        assert item in frame
        request = json.loads(frame)
        await on.peer.send_bytes(b'{"jsonrpc":"2.0","id":%d,"result":%b}\n' % (request["id"], item))
        assert bytes(await call.result()) == item


async def test_an_answer_that_comes_twice_or_that_nobody_asked_for_is_ignored() -> None:
    async with bench() as on:
        for number in range(3):
            call = on.begin(on.client.call, "protocol.ping")
            request = await on.peer.expect("protocol.ping")
            answer = answer_to(request, number)
            await on.peer.send(
                answer, answer, answer_to({"id": 10_000}, 0), answer_to({"id": "x"}, 0)
            )
            assert await call.result() == msgspec.Raw(b"%d" % number)


async def test_an_error_answer_is_raised_as_its_class() -> None:
    async with bench() as on:
        call = on.begin(on.client.request, "session.get", m.GetParams(session_id="s"))
        await on.peer.refuse(await on.peer.expect("session.get"), NotFound())
        with pytest.raises(NotFound):
            await call.result()


async def test_a_result_of_another_shape_is_a_bad_answer() -> None:
    async with bench() as on:
        call = on.begin(on.client.request, "protocol.ping")
        await on.peer.answer(await on.peer.expect("protocol.ping"), {"now": 1})
        with pytest.raises(BadAnswer):
            await call.result()


async def test_what_is_no_json_is_refused_before_it_is_sent() -> None:
    # The server could not say which request its error is for.
    async with bench() as on:
        for item in (b'{"a":"x\ny"}', b'{"a":NaN}', b"{", b'{"a":"\xff"}', b'{"a":"\\ud800"}'):
            with pytest.raises(ParseError):
                await on.client.request("session.append", append_params(item))
        with pytest.raises(FrameTooLarge):
            await on.client.request("session.append", append_params(b'"%b"' % (b"x" * (1 << 20))))
        call = on.begin(on.client.call, "protocol.ping")
        await on.peer.answer(await on.peer.expect("protocol.ping"), PONG)
        await call.result()


async def test_no_more_requests_are_in_flight_than_the_server_takes() -> None:
    async with bench(msgspec.structs.replace(LIMITS, in_flight=2)) as on:
        calls = [on.begin(on.client.call, "protocol.ping") for _ in range(3)]
        requests = [await on.peer.next_message() for _ in range(2)]
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0):
            await on.peer.next_message()
            pytest.fail("a third one was sent")
        await on.peer.answer(requests[0], 0)
        await on.peer.answer(await on.peer.next_message(), 2)
        await on.peer.answer(requests[1], 1)
        assert sorted([int(bytes(await call.result())) for call in calls]) == [0, 1, 2]


async def test_an_exception_of_the_block_comes_out_as_it_is() -> None:
    async with fake_server() as server:
        with pytest.raises(KeyError, match="mine"):
            async with connect(server.path):
                raise KeyError("mine")


# Cancelling.


async def test_a_cancelled_call_cancels_its_request_and_its_late_answer_is_dropped() -> None:
    async with bench(msgspec.structs.replace(LIMITS, in_flight=1)) as on:
        call = on.begin(on.client.call, "session.compact", m.CompactParams(session_id="s"))
        request = await on.peer.expect("session.compact")
        call.scope.cancel()
        cancel = await on.peer.expect("$/cancelRequest")
        assert cancel["params"] == {"id": request["id"]}
        assert "id" not in cancel
        # For the server it is in flight until it is answered.
        later = on.begin(on.client.call, "protocol.ping")
        await anyio.wait_all_tasks_blocked()
        await on.peer.answer(request, "late")
        await on.peer.answer(await on.peer.expect("protocol.ping"), PONG)
        assert msgspec.json.decode(await later.result()) == PONG


async def test_a_cancel_goes_out_also_when_the_client_ends_with_it() -> None:
    async with fake_server() as server, anyio.create_task_group() as tasks:

        async def work() -> None:
            async with connect(server.path) as client:
                await client.call("session.compact", m.CompactParams(session_id="s"))

        outcome = Outcome(tasks, work)
        peer = await server.accept()
        await peer.expect("session.compact")
        outcome.scope.cancel()
        await peer.expect("$/cancelRequest")
        with pytest.raises(anyio.EndOfStream):
            await peer.next_message()


# Connections that end.


async def test_a_read_is_sent_again_over_the_next_connection() -> None:
    async with bench() as on:
        call = on.begin(on.client.call, "session.get", {"session_id": "s"})
        await on.peer.expect("session.get")
        await on.peer.close()
        peer = await on.server.accept()
        await peer.answer(await peer.expect("session.get"), 1)
        assert await call.result() == msgspec.Raw(b"1")


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("session.create", m.CreateParams()),
        ("session.append", append_params()),
        ("session.append", {"session_id": "s", "items": [{"role": "user"}]}),
        ("session.append", b'{"session_id":"s", "operation_id":null, "items":[{}]}'),
        ("session.compact", m.CompactParams(session_id="s")),
        ("session.update", m.UpdateParams(session_id="s", title="t")),
        ("session.delete", m.DeleteParams(session_id="s")),
    ],
)
async def test_a_change_is_repeated_under_one_operation_id(method: str, params: Any) -> None:
    async with bench() as on:
        call = on.begin(on.client.call, method, params)
        sent = (await on.peer.expect(method))["params"]
        assert m.OperationGetParams(operation_id=sent["operation_id"])
        await on.peer.close()
        peer = await on.server.accept()
        request = await peer.expect(method)
        assert request["params"] == sent
        await peer.answer(request, 1)
        await call.result()


async def test_an_operation_id_that_was_given_is_kept() -> None:
    async with bench() as on:
        for params in (
            {"session_id": "s", "operation_id": "mine"},
            b'{"session_id":"s","operation_id":"mine"}',
            m.DeleteParams(session_id="s", operation_id="mine"),
        ):
            call = on.begin(on.client.call, "session.delete", params)
            request = await on.peer.expect("session.delete")
            assert request["params"]["operation_id"] == "mine"
            await on.peer.answer(request, 1)
            await call.result()


async def test_a_shutdown_is_never_sent_to_the_next_server() -> None:
    async with bench() as on:
        call = on.begin(on.client.request, "server.shutdown")
        await on.peer.expect("server.shutdown")
        await on.peer.close()
        with pytest.raises(ConnectionLost):
            await call.result()


async def test_without_reconnect_a_change_fails_with_the_id_to_ask_for() -> None:
    async with bench(reconnect=False, new_operation_id=lambda: "made") as on:
        call = on.begin(on.client.request, "session.append", append_params())
        await on.peer.expect("session.append")
        await on.peer.close()
        with pytest.raises(ConnectionLost) as raised:
            await call.result()
        assert raised.value.operation_id == "made"
        with pytest.raises(ConnectionLost):
            await on.client.request("protocol.ping")


async def test_all_calls_share_the_next_connection() -> None:
    async with bench() as on:
        calls = [on.begin(on.client.call, "protocol.ping") for _ in range(20)]
        for _ in calls:
            await on.peer.expect("protocol.ping")
        await on.peer.close()
        peer = await on.server.accept()
        for _ in calls:
            await peer.answer(await peer.expect("protocol.ping"), PONG)
        for call in calls:
            await call.result()
        assert len(on.server.handshakes) == 2


async def test_a_server_that_starts_again_in_time_is_found() -> None:
    async with bench() as on:
        await on.server.stop()
        await on.peer.close()
        call = on.begin(on.client.call, "protocol.ping")
        await anyio.wait_all_tasks_blocked()
        await on.server.start()
        peer = await on.server.accept()
        await peer.answer(await peer.expect("protocol.ping"), PONG)
        await call.result()


async def test_a_server_that_stays_away_is_not_waited_for_longer_than_the_patience() -> None:
    patience = Patience(total_s=0.2, pause_s=0.01, random=lambda: 0)
    async with bench(patience=patience, new_operation_id=lambda: "made") as on:
        call = on.begin(on.client.request, "session.append", append_params())
        await on.peer.expect("session.append")
        await on.server.stop()
        await on.peer.close()
        with pytest.raises(ConnectionLost) as raised:  # it was sent: nobody knows
            await call.result()
        assert raised.value.operation_id == "made"
        with pytest.raises(NotConnected):  # it was not
            await on.client.request("session.append", append_params())


async def test_no_daemon_is_said_at_once() -> None:
    async with fake_server() as server:
        await server.stop()
        with pytest.raises(NotConnected):
            async with connect(server.path):
                pytest.fail("connected")


async def test_a_daemon_that_is_about_to_listen_is_waited_for_on_demand() -> None:
    async with fake_server() as server, anyio.create_task_group() as tasks:
        await server.stop()

        async def work() -> None:
            async with connect(server.path, wait_s=5, patience=QUICK) as client:
                await client.call("protocol.ping")

        outcome = Outcome(tasks, work)
        await anyio.wait_all_tasks_blocked()
        await server.start()
        peer = await server.accept()
        await peer.answer(await peer.expect("protocol.ping"), PONG)
        await outcome.result()


async def test_a_server_that_refuses_the_handshake_is_not_asked_again() -> None:
    async def refuse(peer: Peer, message: Message) -> None:
        await peer.refuse(message, UnsupportedProtocol(supported=[2]))

    async with fake_server() as server:
        server.answers_handshake = refuse
        with pytest.raises(UnsupportedProtocol):
            async with connect(server.path, wait_s=5):
                pytest.fail("connected")
        assert len(server.handshakes) == 1


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b"[]\n", b'{"id":0}\n'])
async def test_what_is_no_recapd_is_a_bad_answer(answer: bytes) -> None:
    async def garble(peer: Peer, message: Message) -> None:
        await peer.send_bytes(answer)

    async with fake_server() as server:
        server.answers_handshake = garble
        with pytest.raises(BadAnswer):
            async with connect(server.path):
                pytest.fail("connected")


async def test_another_store_at_the_same_socket_is_not_taken_for_the_first() -> None:
    async with bench() as on:
        call = on.begin(on.client.call, "protocol.ping")
        await on.peer.expect("protocol.ping")
        on.server.store_id = "another"
        await on.peer.close()
        with pytest.raises(ConnectionLost) as raised:
            await call.result()
        assert isinstance(raised.value.__cause__, NotConnected)
        with pytest.raises(NotConnected, match="another store"):
            await on.client.call("protocol.ping")


async def test_an_error_that_is_for_no_request_ends_all_that_are_under_way() -> None:
    async with bench() as on:
        call = on.begin(on.client.call, "session.get", {"session_id": "s"})
        await on.peer.expect("session.get")
        await on.peer.send({"jsonrpc": "2.0", "id": None, "error": InvalidRequest().to_wire()})
        with pytest.raises(InvalidRequest):
            await call.result()


# Better times.


async def test_overloaded_is_waited_out_as_long_as_the_server_says() -> None:
    async with bench() as on:
        call = on.begin(on.client.call, "protocol.ping")
        begun_s = anyio.current_time()
        await on.peer.refuse(await on.peer.next_message(), Overloaded(retry_after_ms=50))
        request = await on.peer.next_message()
        assert anyio.current_time() - begun_s >= 0.049
        await on.peer.answer(request, PONG)
        await call.result()


async def test_overloaded_for_longer_than_the_patience_is_an_error_at_once() -> None:
    async with bench() as on:
        call = on.begin(on.client.call, "protocol.ping")
        await on.peer.refuse(await on.peer.next_message(), Overloaded(retry_after_ms=3_600_000))
        with pytest.raises(Overloaded):
            await call.result()


async def test_overloaded_over_and_over_ends_with_the_patience() -> None:
    async with bench(patience=Patience(total_s=0.1, pause_s=0.01, random=lambda: 0)) as on:
        call = on.begin(on.client.call, "protocol.ping")

        async def refuse_all() -> None:
            while True:
                await on.peer.refuse(await on.peer.next_message(), Overloaded(retry_after_ms=1))

        refusing = on.begin(refuse_all)
        with pytest.raises(Overloaded):
            await call.result()
        refusing.scope.cancel()


async def test_a_server_that_has_no_connection_left_is_asked_again() -> None:
    async def refuse_one(peer: Peer, message: Message) -> None:
        server.answers_handshake = welcome
        error = Overloaded(retry_after_ms=1).to_wire()
        await peer.send({"jsonrpc": "2.0", "id": None, "error": error})
        await peer.close()

    async with fake_server() as server:
        welcome = server.answers_handshake
        server.answers_handshake = refuse_one
        async with connect(server.path, wait_s=5):
            await server.accept()


async def test_a_request_that_meets_a_draining_server_goes_to_the_next() -> None:
    async with bench() as on:
        waiting = on.begin(on.client.call, "session.get", {"session_id": "s"})
        request = await on.peer.expect("session.get")
        call = on.begin(on.client.call, "protocol.ping")
        await on.peer.refuse(await on.peer.expect("protocol.ping"), ShuttingDown())
        peer = await on.server.accept()
        await peer.answer(await peer.expect("protocol.ping"), PONG)
        await call.result()
        await on.peer.answer(request, 1)  # what was under way ends where it began
        assert await waiting.result() == msgspec.Raw(b"1")


async def test_an_unknown_outcome_is_found_out_by_one_repetition() -> None:
    async with bench() as on:
        call = on.begin(on.client.request, "session.append", append_params())
        first = await on.peer.expect("session.append")
        await on.peer.refuse(first, OutcomeUnknown())
        second = await on.peer.expect("session.append")
        assert second["params"] == first["params"]
        await on.peer.answer(second, appended())
        assert await call.result() == appended()

        call = on.begin(on.client.request, "session.append", append_params())
        for _ in range(2):
            await on.peer.refuse(await on.peer.expect("session.append"), OutcomeUnknown())
        with pytest.raises(OutcomeUnknown):
            await call.result()


# What takes more than one request.


async def gather(items: AsyncGenerator[Any] | Any) -> list[Any]:
    return [item async for item in items]


async def test_items_are_appended_in_pieces_that_keep_to_the_limits() -> None:
    limits = msgspec.structs.replace(LIMITS, items_per_append=3, item_bytes=100)
    items = [b'{"n":%d}' % number for number in range(4)] + [b'"%b"' % (b"x" * 90)] * 2
    async with bench(limits) as on:
        call = on.begin(gather, on.client.append_items("s", items, expected_revision=7))
        sent: list[list[Any]] = []
        for revision in range(8, 12):
            request = await on.peer.expect("session.append")
            assert request["params"]["expected_revision"] == revision - 1
            sent.append(request["params"]["items"])
            await on.peer.answer(request, appended(revision))
        assert [len(piece) for piece in sent] == [3, 1, 1, 1]
        assert [json.loads(item) for item in items] == [item for piece in sent for item in piece]
        assert len(await call.result()) == 4


async def test_an_item_that_is_too_large_is_named_by_its_place_among_all() -> None:
    limits = msgspec.structs.replace(LIMITS, items_per_append=1, item_bytes=100)
    async with bench(limits) as on:
        call = on.begin(gather, on.client.append_items("s", [b"{}", b'"%b"' % (b"x" * 99)]))
        # The first item was to go out only when the second proved too large.
        with pytest.raises(ItemTooLarge) as raised:
            await call.result()
        assert raised.value.data == {"index": 1, "limit_bytes": 100}


async def test_entries_come_page_by_page() -> None:
    async with bench() as on:
        call = on.begin(gather, on.client.pages("s", order="desc"))
        for number, cursor in ((2, "next"), (1, None)):
            request = await on.peer.expect("session.get")
            assert request["params"]["order"] == "desc"
            assert request["params"]["cursor"] == ("next" if cursor is None else None)
            entry = m.Entry(number, "t", msgspec.Raw(b'{"n": 1}'))
            page = m.GetResult(SESSION, 1, cursor, m.Redaction("none", {}), [entry])
            text = msgspec.json.encode(page)
            await on.peer.send_bytes(
                b'{"jsonrpc":"2.0","id":%d,"result":%b}\n' % (request["id"], text)
            )
        entries = await call.result()
        assert [entry.id for entry in entries] == [2, 1]
        assert bytes(entries[0].item) == b'{"n": 1}'


async def test_an_export_comes_chunk_by_chunk_with_its_manifest() -> None:
    manifest = m.Manifest("s", "jsonl", [], 2, m.Redaction("policy", {}))
    async with bench() as on:
        export = on.client.export("s", revision="all")
        call = on.begin(gather, export)
        request = await on.peer.expect("session.export")
        assert request["params"]["revision"] == "all"
        await on.peer.answer(request, m.ExportResult("a", "c", False))
        request = await on.peer.expect("session.export")
        assert request["params"]["cursor"] == "c"
        await on.peer.answer(request, m.ExportResult("b", None, True, manifest))
        assert await call.result() == ["a", "b"]
        assert export.manifest == manifest


# Subscriptions.


class Log:
    """The events of a server that answers what a subscription asks, connection after connection."""

    def __init__(self, on: Bench) -> None:
        self.on = on
        self.peer = on.peer
        self.number = 0

    async def subscribed(
        self, since: int | str, *told: Message, from_seq: int = 0, resume: str = "exact"
    ) -> None:
        """Answer `session.subscribe`; `told` goes out with the very same write."""
        request = await self.peer.expect("session.subscribe")
        assert request["params"]["since"] == since
        self.number += 1
        result = {"subscription_id": self.name, "from_seq": from_seq, "resume": resume}
        await self.peer.send(answer_to(request, result), *told)

    @property
    def name(self) -> str:
        return f"sub{self.number}"

    def event(self, session_id: str, seq: int, method: str = "history.appended") -> Message:
        return notification(method, subscription_id=self.name, **body(session_id, seq))

    async def reconnected(self) -> None:
        await self.peer.close()
        self.peer = await self.on.server.accept()

    async def pinged(self) -> None:
        await self.peer.answer(await self.peer.expect("protocol.ping"), PONG)

    async def fetched(
        self, session_id: str, since: int, *seqs: int, method: str = "history.appended"
    ) -> None:
        """Answer `session.events`; then once more, that there are no others."""
        for found in (seqs, ()) if seqs else ((),):
            request = await self.peer.expect("session.events")
            assert request["params"]["session_id"] == session_id
            assert request["params"]["since"] == since
            since = found[-1] if found else since
            events = [{"method": method, **body(session_id, seq)} for seq in found]
            await self.peer.answer(
                request, {"events": events, "next_seq": since, "resume": "exact"}
            )

    async def listed(self, *session_ids: str) -> None:
        request = await self.peer.expect("session.list")
        assert request["params"]["filter"]["updated_after"] == "2026-12-01T09:59:59Z"
        sessions = [msgspec.structs.replace(SESSION, session_id=name) for name in session_ids]
        await self.peer.answer(request, m.ListResult(sessions, None))


def body(session_id: str, seq: int) -> Message:
    return {
        "session_id": session_id,
        "seq": seq,
        "prev_seq": seq - 1,
        "revision": seq,
        "generation": 0,
        "at": f"2026-12-01T{'09' if seq < 3 else '11'}:00:00.000Z",
    }


class Heard:
    """What came out of a subscription; `wait` for the n-th."""

    def __init__(self, on: Bench, *args: Any) -> None:
        self.notices: list[Notice] = []
        self._came = anyio.Event()
        self.outcome = on.begin(self._listen, on.client, *args)

    async def _listen(self, client: Client, *args: Any) -> None:
        async with client.subscribe(*args) as events:
            async for notice in events:
                self.notices.append(notice)
                self._came.set()
                self._came = anyio.Event()

    async def wait(self, count: int) -> list[tuple[str | None, int | None]]:
        while len(self.notices) < count:
            await self._came.wait()
        return [(notice.session_id, notice.seq) for notice in self.notices]


@asynccontextmanager
async def listening(*args: Any) -> AsyncGenerator[tuple[Heard, Log]]:
    async with bench() as on:
        heard = Heard(on, *args)
        yield heard, Log(on)
        heard.outcome.scope.cancel()


async def test_events_that_come_together_with_the_answer_are_not_missed() -> None:
    async with listening("s", 4) as (heard, log):
        log.number += 1
        events = [log.event("s", seq) for seq in (5, 6)]
        log.number -= 1
        await log.subscribed(4, *events, from_seq=4)
        assert await heard.wait(2) == [("s", 5), ("s", 6)]
        assert heard.notices[0].method == "history.appended"
        told = json.loads(bytes(heard.notices[0].params))
        assert told == {"subscription_id": "sub1"} | body("s", 5)


async def test_one_session_goes_on_behind_its_last_seq() -> None:
    async with listening("s") as (heard, log):
        await log.subscribed("now", from_seq=7)
        await log.peer.send(log.event("s", 8))
        await heard.wait(1)
        await log.reconnected()
        await log.subscribed(8, from_seq=8)
        await log.peer.send(log.event("s", 9))
        assert await heard.wait(2) == [("s", 8), ("s", 9)]


async def test_no_event_before_the_loss_still_means_behind_the_first_seq() -> None:
    async with listening("s") as (heard, log):
        await log.subscribed("now", from_seq=7)
        await anyio.wait_all_tasks_blocked()
        await log.reconnected()
        await log.subscribed(7, log.event("s", 8), from_seq=7)
        log.number = 2
        await log.peer.send(log.event("s", 8))
        assert await heard.wait(1) == [("s", 8)]


async def test_an_event_that_is_told_twice_is_heard_once() -> None:
    async with listening() as (heard, log):
        await log.pinged()
        await log.subscribed("now")
        await log.peer.send(
            *[log.event(name, seq) for name in "ab" for seq in (1, 2, 2, 1, 3)], log.event("a", 4)
        )
        assert await heard.wait(7) == [
            *[("a", 1), ("a", 2), ("a", 3)],
            *[("b", 1), ("b", 2), ("b", 3), ("a", 4)],
        ]


async def test_a_log_that_does_not_know_the_seq_is_told_as_a_reset() -> None:
    async with listening("s", 9) as (heard, log):
        await log.subscribed(9, from_seq=2, resume="reset")
        await log.peer.send(log.event("s", 3))
        assert await heard.wait(2) == [("s", None), ("s", 3)]
        assert heard.notices[0].method == RESET


async def test_gaps_of_all_sessions_are_fetched_and_come_before_what_is_live() -> None:
    async with listening() as (heard, log):
        await log.pinged()
        await log.subscribed("now")
        await log.peer.send(log.event("a", 5), log.event("b", 7))
        await heard.wait(2)
        await log.reconnected()
        log.number = 1
        await log.subscribed("now")
        await log.peer.send(log.event("a", 8), log.event("b", 8))
        await log.fetched("a", 5, 6, 7, 8)
        await log.fetched("b", 7)
        await log.listed("a", "b")
        assert (await heard.wait(6))[2:] == [("a", 6), ("a", 7), ("a", 8), ("b", 8)]


async def test_sessions_whose_first_events_fell_into_the_gap_are_found() -> None:
    async with listening() as (heard, log):
        await log.pinged()
        await log.subscribed("now")
        await anyio.wait_all_tasks_blocked()
        await log.reconnected()
        await log.subscribed("now")
        await log.peer.send(log.event("new", 5))
        await log.listed("new")
        await log.fetched("new", 0, 1, 2, 3, 4, 5)  # 1 and 2 are from before the subscription
        await log.peer.send(log.event("new", 6))
        assert await heard.wait(4) == [("new", 3), ("new", 4), ("new", 5), ("new", 6)]


async def test_all_events_from_the_start_are_told_anew_and_heard_once() -> None:
    async with listening(None, "start") as (heard, log):
        await log.subscribed("start")
        await log.peer.send(log.event("a", 1), log.event("a", 2))
        await heard.wait(2)
        await log.reconnected()
        await log.subscribed("start")
        await log.peer.send(*[log.event("a", seq) for seq in (1, 2, 3)], log.event("b", 1))
        assert (await heard.wait(4))[2:] == [("a", 3), ("b", 1)]


async def test_only_events_that_were_asked_for_are_heard_from_a_gap() -> None:
    async with listening(None, "now", ["session.updated"]) as (heard, log):
        await log.pinged()
        await log.subscribed("now")
        await log.peer.send(log.event("a", 5, "session.updated"))
        await heard.wait(1)
        await log.reconnected()
        await log.subscribed("now")
        await log.fetched("a", 5, 6, 7)
        await log.listed()
        await log.peer.send(log.event("a", 8, "session.updated"))
        assert (await heard.wait(2))[1:] == [("a", 8)]


async def test_a_session_that_was_deleted_meanwhile_says_so_and_ends() -> None:
    async with listening("s", 3) as (heard, log):
        await log.subscribed(3, from_seq=3)
        await anyio.wait_all_tasks_blocked()
        await log.reconnected()
        await log.peer.refuse(await log.peer.expect("session.subscribe"), NotFound())
        request = await log.peer.expect("session.events")
        event = {"method": "session.deleted", **body("s", 6)}
        await log.peer.answer(request, {"events": [event], "next_seq": 6, "resume": "exact"})
        await log.peer.refuse(await log.peer.expect("session.events"), NotFound())
        assert await heard.wait(1) == [("s", 6)]
        with pytest.raises(NotFound):
            await heard.outcome.result()


async def test_what_has_no_seq_is_passed_through() -> None:
    async with listening("s") as (heard, log):
        await log.subscribed("now")
        progress = {"session_id": "s", "operation_id": "o", "stage": "x", "done": 1, "total": 2}
        await log.peer.send(
            notification("compaction.progress", subscription_id=log.name, **progress),
            notification("server.draining", subscription_id=log.name, deadline="t"),
            notification("something.new", of="a later protocol"),
            log.event("s", 1),
        )
        assert await heard.wait(3) == [("s", None), (None, None), ("s", 1)]
        assert [notice.method for notice in heard.notices[:2]] == [
            "compaction.progress",
            "server.draining",
        ]


async def test_a_listener_that_is_slow_misses_nothing_and_delays_no_answer() -> None:
    async with bench() as on:
        log = Log(on)

        async def listen() -> list[int | None]:
            seqs: list[int | None] = []
            async with on.client.subscribe("s", 0) as events:
                await on.client.call("protocol.ping")  # the reader has all events before it
                async for notice in events:
                    seqs.append(notice.seq)
                    if notice.seq == 3001:
                        return seqs
            return []

        listening = on.begin(listen)
        await log.subscribed(0)
        for seq in range(1, 3000):
            await log.peer.send(log.event("s", seq))
        await log.pinged()
        request = await log.peer.expect("session.events")
        since: int = request["params"]["since"]
        assert 1000 <= since < 2000
        await log.peer.send(log.event("s", 3000))
        events = [
            {"method": "history.appended", **body("s", seq)} for seq in range(since + 1, 3001)
        ]
        await log.peer.answer(request, {"events": events, "next_seq": 3000, "resume": "exact"})
        await log.fetched("s", 3000)
        await log.peer.send(log.event("s", 3001))
        assert await listening.result() == list(range(1, 3002))


async def test_a_wait_for_an_event_can_be_cancelled_at_any_place_without_losing_one() -> None:
    async with bench() as on:
        log = Log(on)
        heard: list[int | None] = []

        async def next_of(events: Subscription) -> None:
            heard.append((await anext(events)).seq)

        async def serve() -> None:
            """Tell two events over each connection, then end it."""
            since = 0
            while True:
                request = await log.peer.expect("session.subscribe")
                log.number += 1
                since = max(since, request["params"]["since"])
                result = {"subscription_id": log.name, "from_seq": since, "resume": "exact"}
                events = [log.event("s", since + step) for step in (1, 2)]
                await log.peer.send(answer_to(request, result), *events)
                await log.reconnected()

        serving = on.begin(serve)
        async with on.client.subscribe("s", 0) as events:
            for _ in range(200):
                waiting = on.begin(next_of, events)
                await anyio.lowlevel.checkpoint()
                waiting.scope.cancel()
                await waiting.result()
            while len(heard) < 250:
                await next_of(events)
        serving.scope.cancel()
        assert heard == list(range(1, len(heard) + 1))


async def test_the_end_of_the_block_ends_the_subscription() -> None:
    async with bench() as on:
        log = Log(on)

        async def listen() -> None:
            async with on.client.subscribe("s"):
                pass

        listening = on.begin(listen)
        await log.subscribed("now")
        message = await log.peer.expect("session.unsubscribe")
        assert message["params"] == {"subscription_id": "sub1"}
        assert "id" not in message
        await listening.result()


async def test_a_subscription_that_is_cancelled_before_its_answer_ends_when_that_comes() -> None:
    async with bench() as on:
        log = Log(on)

        async def listen() -> None:
            async with on.client.subscribe("s"):
                pass

        listening = on.begin(listen)
        request = await log.peer.expect("session.subscribe")
        listening.scope.cancel()
        await log.peer.expect("$/cancelRequest")
        result = {"subscription_id": "late", "from_seq": 0, "resume": "exact"}
        await log.peer.answer(request, result)
        message = await log.peer.expect("session.unsubscribe")
        assert message["params"] == {"subscription_id": "late"}


async def test_a_session_that_is_not_there_is_said_when_subscribing() -> None:
    async with bench() as on:
        heard = Heard(on, "s")
        await on.peer.refuse(await on.peer.expect("session.subscribe"), NotFound())
        with pytest.raises(NotFound):
            await heard.outcome.result()


async def test_a_listener_hears_when_the_server_stays_away_and_may_try_again() -> None:
    async with bench(patience=Patience(total_s=0.1, pause_s=0.01)) as on:
        log = Log(on)
        await on.server.stop()

        async def listen() -> int | None:
            async with on.client.subscribe("s") as events:
                with pytest.raises(NotConnected):
                    await anext(events)
                await on.server.start()
                return (await anext(events)).seq

        listening = on.begin(listen)
        await log.subscribed("now", from_seq=4)
        await log.reconnected()
        await log.subscribed(4)
        await log.peer.send(log.event("s", 5))
        assert await listening.result() == 5
