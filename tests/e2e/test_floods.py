"""Much of what is allowed: subscriptions, notifications, cancels, clients that never read.

The bounds are those of SECURITY.md: each connection holds at most a few MiB for a client that does
not read, and others are answered meanwhile.
"""

import json
import os
import socket
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
from tests.e2e.conftest import WAIT_S, Process, Serve

from recapd.protocol import messages as m

LONG: Final = bool(os.environ.get("RECAPD_LONG"))
CONNECTIONS: Final = 40
EACH: Final = 250  # subscriptions of a connection
AT_ONCE: Final = 50  # may be in flight
MEMORY_MIB: Final = 400
"""What the daemon may grow by; 10 000 subscriptions and 39 clients that do not read."""


def request(id: int | None, method: str, /, **params: object) -> bytes:
    message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
    return json.dumps(message if id is None else message | {"id": id}).encode() + b"\n"


class Peer:
    """A client that reads only when it is asked to."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._reader = connection.makefile("rb")

    async def send(self, data: bytes) -> None:
        await anyio.to_thread.run_sync(self.connection.sendall, data)

    async def read(self, count: int) -> list[Any]:
        def read() -> list[Any]:
            return [json.loads(self._reader.readline()) for _ in range(count)]

        return await anyio.to_thread.run_sync(read)

    async def rest(self) -> bytes:
        """Say that no more is sent; all that still comes."""
        self.connection.shutdown(socket.SHUT_WR)
        return await anyio.to_thread.run_sync(self._reader.read)


@contextmanager
def connected(process: Process) -> Generator[Peer]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(str(process.socket))
        yield Peer(connection)


def rss_mib(process: Process) -> float:
    fields = Path(f"/proc/{process.process.pid}/status").read_text().split("VmRSS:")[1]
    return int(fields.split()[0]) / 1024


@pytest.mark.promise("J1")
async def test_ten_thousand_subscriptions_are_served_and_bounded(serve: Serve) -> None:
    """All but one of their clients never read what they are told."""
    appends = 100 if LONG else 20
    async with serve() as process, process.connect() as client:
        await client.request("session.create", m.CreateParams(session_id="a"))
        before_mib = rss_mib(process)
        with ExitStack() as stack:
            peers = [stack.enter_context(connected(process)) for _ in range(CONNECTIONS)]
            some = [request(n, "session.subscribe", session_id="a") for n in range(AT_ONCE)]
            for peer in peers:
                for _ in range(EACH // AT_ONCE):
                    await peer.send(b"".join(some))
                    answers = await peer.read(AT_ONCE)
                    assert sorted(answer["id"] for answer in answers) == [*range(AT_ONCE)]
                    assert all("result" in answer for answer in answers)
            info = await client.request("server.info")
            assert info.connections == CONNECTIONS + 1
            item = msgspec.Raw(b'{"role":"user","content":"x"}')
            for _ in range(appends):
                await client.request("session.append", m.AppendParams(session_id="a", items=[item]))
                await client.request("protocol.ping")
            told = await peers[0].read(EACH * appends)
            by_id: dict[str, list[int]] = {}
            for notice in told:
                params = notice["params"]
                by_id.setdefault(params["subscription_id"], []).append(params["seq"])
            assert len(by_id) == EACH
            assert all(seqs == [*range(2, appends + 2)] for seqs in by_id.values())
            assert rss_mib(process) - before_mib < MEMORY_MIB
        await client.request("session.append", m.AppendParams(session_id="a", items=[item]))


@pytest.mark.promise("J1")
@pytest.mark.parametrize(
    "flood",
    [
        request(None, "$/cancelRequest", id=1),
        request(None, "protocol.ping"),
        request(None, "no.such.method", x=[1] * 10),
        request(None, "session.get", session_id="a"),
        request(None, "session.append", session_id="a", items=[]),
        b'{"jsonrpc":"2.0","method":7}\n',
    ],
    ids=["cancels", "pings", "unknown", "reads", "wrong", "no request"],
)
async def test_a_flood_of_what_nobody_answers_holds_up_nobody(serve: Serve, flood: bytes) -> None:
    """Notifications have no answer, whatever they say; what comes behind them has its own."""
    count = 200_000 if LONG else 20_000
    async with serve() as process, process.connect() as client:
        await client.request("session.create", m.CreateParams(session_id="a"))
        before_mib = rss_mib(process)
        with connected(process) as peer:
            done = anyio.Event()
            answers: list[Any] = []

            async def send() -> None:
                await peer.send(flood * count)
                await peer.send(request(1, "session.get", session_id="a", view="info"))
                done.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                if b'"method":7' in flood:  # each has an answer, which must be read
                    answers = await peer.read(count)
                    assert all(answer["error"]["code"] == -32600 for answer in answers)
                while not done.is_set():
                    await client.request("protocol.ping")
                answers = await peer.read(1)
                while answers[-1].get("id") != 1:  # errors of what is no request have no id
                    answers += await peer.read(1)
            assert answers[-1]["result"]["session"]["entries"] == 0
            if b'"method":7' not in flood:
                assert len(answers) == 1
        assert rss_mib(process) - before_mib < MEMORY_MIB


@pytest.mark.parametrize("framing", ["lines", "content-length"])
async def test_half_a_request_has_no_effect_wherever_it_ends(serve: Serve, framing: str) -> None:
    """A connection that is cut at each byte of an append, and once behind it."""
    body = request(1, "session.append", session_id="a", items=[{"role": "user", "content": "é"}])
    frame = body if framing == "lines" else b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    async with serve() as process, process.connect() as client:
        await client.request("session.create", m.CreateParams(session_id="a"))
        for end in range(len(frame)):
            with connected(process) as peer:
                await peer.send(frame[:end])
                assert b'"result"' not in await peer.rest()
        params = m.GetParams(session_id="a", view="info")
        assert (await client.request("session.get", params)).session.entries == 0
        with connected(process) as peer:
            await peer.send(frame)
            assert b'"entry_ids":[1]' in await peer.rest()
        assert (await client.request("session.get", params)).session.entries == 1
