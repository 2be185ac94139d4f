"""Public transcripts go in and come out byte for byte (DESIGN.md promise 6; BUGLOG B31)."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import Raw
from tests.e2e.conftest import Serve

from recapd.protocol import messages as m
from recapd.protocol.client import Client

History = tuple[str, list[bytes]]
"""Where it comes from, and its items as they stand in the file."""

_decode_list = msgspec.json.Decoder(list[Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, Raw]).decode


def responses_histories(corpus: Path) -> Iterator[History]:
    for path in sorted(corpus.glob("*/*.items.json")):
        yield f"{path.parent.name}/{path.name}", list(map(bytes, _decode_list(path.read_bytes())))


def chat_histories(corpus: Path) -> Iterator[History]:
    for path in sorted((corpus / "10-swe-agent-chat").glob("*.json")):
        history = _decode_object(path.read_bytes())["history"]
        yield path.name, list(map(bytes, _decode_list(history)))
    for path in sorted((corpus / "11-mini-swe-agent").glob("*.json")):
        yield path.name, list(map(bytes, _decode_list(path.read_bytes())))
    for path in sorted((corpus / "12-tau-bench-airline").glob("*.json")):
        for number, session in enumerate(_decode_list(path.read_bytes())):
            traj = _decode_object(session)["traj"]
            yield f"{path.name}-{number}", list(map(bytes, _decode_list(traj)))


def one_line(item: bytes) -> bytes:
    """As it comes back: line breaks between tokens become spaces, every other byte is kept."""
    return item.replace(b"\n", b" ").replace(b"\r", b" ")


async def exported(client: Client, session_id: str, revision: int | None) -> list[bytes]:
    chunks = client.export(
        session_id, revision="current" if revision is None else revision, redact="none"
    )
    text = "".join([chunk async for chunk in chunks])
    return text.encode().split(b"\n")[:-1]


async def stored(client: Client, session_id: str, revision: int | None) -> list[bytes]:
    return [bytes(entry.item) async for entry in client.pages(session_id, revision=revision)]


@pytest.mark.parametrize("kind", ["responses", "chat"])
async def test_histories_come_out_as_they_went_in(serve: Serve, corpus: Path, kind: str) -> None:
    """DESIGN.md promise 6: live, archived and exported."""
    histories = list({"responses": responses_histories, "chat": chat_histories}[kind](corpus))
    assert len(histories) > 30
    async with serve("--context-limit", "10000000") as process, process.connect() as client:
        for number, (name, items) in enumerate(histories):
            assert items, name
            session_id = f"{kind}-{number}"
            await client.request(
                "session.create", m.CreateParams(session_id=session_id, title=name)
            )
            async for _ in client.append_items(session_id, items):
                pass
            expected = [one_line(item) for item in items]
            assert await stored(client, session_id, None) == expected, name
            assert await exported(client, session_id, None) == expected, name
            result = await client.request(
                "session.compact", m.CompactParams(session_id=session_id, force=True)
            )
            revision = result.archived_revision
            assert isinstance(revision, int)
            assert await stored(client, session_id, revision) == expected, name
            assert await exported(client, session_id, revision) == expected, name
