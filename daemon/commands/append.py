"""`recapd append`: add items to a session, as the bytes that they are."""

from collections.abc import Iterator
from typing import BinaryIO, Final

import click
import msgspec

from recapd.daemon.cli import ClientCommand, Failure, current_options, failure_of, run_client
from recapd.daemon.terminal import counted, write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import AppendResult, AppendWarning, Session

_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_decode_raw = msgspec.json.Decoder(msgspec.Raw).decode
_decode_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


class _Appended(msgspec.Struct):
    """The results of all requests as one."""

    session: Session | None = None
    entry_ids: list[int] = []
    warnings: list[AppendWarning] = []


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
@click.argument("file", type=click.File("rb"), default="-")
@click.option(
    "--expected-revision",
    type=click.IntRange(min=0),
    help="Append only if the session is at this revision.",
)
def command(session_id: str, file: BinaryIO, expected_revision: int | None) -> None:
    """Append the items in FILE (`-`: standard input) to a session.

    FILE holds JSON: an array of items, one item, or one item a line. Many items go in several
    requests, each of which is all or nothing; after a fault the ones before it are there.
    """
    if file.isatty():
        click.echo("Reading items from the terminal; Ctrl-D ends them.", err=True)
    done = _Appended()

    async def append(client: Client) -> None:
        items = read_items(file)
        async for result in client.append_items(
            session_id, items, expected_revision=expected_revision
        ):
            _add(done, result)

    try:
        run_client(append)
    except Exception as error:
        failure = failure_of(error)
        if failure is not None and done.entry_ids:
            items = counted(len(done.entry_ids), "item")
            click.echo(f"Before this, {items} went into the session:", err=True)
        raise
    if done.session is None:
        raise Failure("There are no items.")
    if current_options().json:
        write_json(msgspec.json.encode(done))
        return
    for warning in done.warnings:
        click.echo(f"entry {warning.entry_id}: {warning.reason}", err=True)
    items, revision = counted(len(done.entry_ids), "item"), done.session.revision
    click.echo(f"{items}, entry {done.entry_ids[0]} to {done.entry_ids[-1]}, revision {revision}")


def _add(done: _Appended, result: AppendResult) -> None:
    done.session = result.session
    done.entry_ids += result.entry_ids
    done.warnings += result.warnings


def read_items(file: BinaryIO) -> Iterator[bytes]:
    """The items in a file, one by one: of an array, of JSON Lines, or the only one.

    Lines are read as they are needed; anything else is read whole. Raises Failure.
    """
    number = 0
    for line in file:
        number += 1
        text = line.removeprefix(_BYTE_ORDER_MARK).strip() if number == 1 else line.strip()
        if not text:
            continue
        if text.startswith(b"{") and _is_json(text):
            yield text
            yield from _lines(file, number)
        elif text.startswith((b"{", b"[")):
            yield from _whole(text + b"\n" + file.read())
        else:
            raise Failure("The input does not begin with a JSON object or array.")
        return


def _lines(file: BinaryIO, number: int) -> Iterator[bytes]:
    """The lines behind the first item, whose line has this number."""
    for line in file:
        number += 1
        text = line.strip()
        if not text:
            continue
        if not text.startswith(b"{") or not _is_json(text):
            raise Failure(f"Line {number} is not a JSON object.")
        yield text


def _whole(text: bytes) -> Iterator[bytes]:
    try:
        items = _decode_array(text) if text.startswith(b"[") else [_decode_raw(text)]
    except (msgspec.DecodeError, RecursionError) as error:
        raise Failure("The input is not JSON.") from error
    for index, item in enumerate(items):
        item_bytes = bytes(item)
        if not item_bytes.startswith(b"{"):
            raise Failure(f"Item {index} of the array is not an object.")
        yield item_bytes


def _is_json(text: bytes) -> bool:
    try:
        _decode_raw(text)
        text.decode()  # msgspec does not look into strings that it skips
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return False
    return True
