"""A daemon that may open few files: connections leave it those that it needs (PROMISES.md F4)."""

import resource
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager

import anyio
import anyio.abc
import msgspec
import pytest
from tests.e2e.conftest import WAIT_S, Spawn

from recapd.protocol import messages as m

CLIENTS = 200


@contextmanager
def files_at_most(number: int) -> Generator[None]:
    """For processes that are started within the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def said_to(stream: anyio.abc.SocketStream) -> bytes:
    """The answer to a ping; where the daemon closed before it was sent, what it said before."""
    try:
        await stream.send(b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping"}\n')
    except (anyio.BrokenResourceError, OSError):
        pass  # refused already; the refusal can still be read
    said = b""
    try:
        while not said.endswith(b"\n"):
            said += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        pass
    return said


@pytest.mark.promise("F4")
@pytest.mark.parametrize("limit", [64, 96, 128])
async def test_clients_leave_the_descriptors_that_a_commit_needs(spawn: Spawn, limit: int) -> None:
    """Of 200 clients as many are served as there is room for, the others get an answer or an end;
    appends, compactions and reads of archives go on beside them.
    """
    with files_at_most(limit):
        process = spawn()
        assert await process.ready(), process.said()
    async with process.connect() as client, AsyncExitStack() as stack:
        room = client.server.limits.connections
        assert room == max(1, limit - 64)
        await client.request("session.create", m.CreateParams(session_id="a"))
        served = refused = closed = 0
        with anyio.fail_after(2 * WAIT_S):
            for number in range(CLIENTS):
                stream = await stack.enter_async_context(await anyio.connect_unix(process.socket))
                said = await said_to(stream)
                served += b'"result"' in said
                refused += b'"overloaded"' in said
                closed += not said
                if number % 20 == 0:
                    item = msgspec.Raw(b'{"role":"user","content":"x"}')
                    append = m.AppendParams(session_id="a", items=[item])
                    appended = await client.request("session.append", append)
                    compact = m.CompactParams(session_id="a", summary="s")
                    done = await client.request("session.compact", compact)
                    assert done.archived_revision == appended.session.revision
                    got = m.GetParams(session_id="a", revision=appended.session.revision)
                    await client.request("session.get", got)
        assert served == room - 1
        assert served + refused + closed == CLIENTS
    assert "EMFILE" not in process.said()
