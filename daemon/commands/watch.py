"""`recapd watch`: what happens, as it happens."""

import sys
from typing import Any

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import printable
from recapd.protocol.client import Client, Notice
from recapd.protocol.items import is_array, is_object
from recapd.protocol.subscription import Since

_ENVELOPE = frozenset({"subscription_id", "session_id", "seq", "prev_seq", "at"})


def _parse_since(context: click.Context, parameter: click.Parameter, value: str) -> int | str:
    if value in ("now", "start"):
        return value
    if value.isdecimal():
        return int(value)
    raise click.BadParameter("give the seq of an event, `now` or `start`")


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="[SESSION]", required=False)
@click.option(
    "--since",
    callback=_parse_since,
    default="now",
    metavar="SEQ|now|start",
    help="Events after this one of the session.  [now]",
)
def command(session_id: str | None, since: Since) -> None:
    """Print a line for each event.

    Of a session, or of all, until interrupted. It goes on where it was when the daemon starts again
    soon. With --json each line is a document.
    """
    if session_id is None and isinstance(since, int):
        raise click.UsageError("A seq is one of a session: name the session.")
    as_json = current_options().json

    async def watch(client: Client) -> None:
        async with client.subscribe(session_id, since) as events:
            async for notice in events:
                sys.stdout.write((_json if as_json else _text)(notice) + "\n")
                sys.stdout.flush()

    run_client(watch)


def _json(notice: Notice) -> str:
    """The form that `session.events` gives: the parameters, with the method beside."""
    return f'{{"method":"{notice.method}",{bytes(notice.params)[1:].decode()}'


def _text(notice: Notice) -> str:
    params: dict[str, Any] = msgspec.json.decode(notice.params)
    where = "" if notice.session_id is None else notice.session_id
    number = "" if notice.seq is None else f"#{notice.seq}"
    details = [f"{name} {_short(value)}" for name, value in params.items() if name not in _ENVELOPE]
    line = f"{params.get('at', ''):<24} {where} {number} {notice.method}  {', '.join(details)}"
    return printable(" ".join(line.split()))


def _short(value: Any) -> object:
    """Of tokens their count, of entries how many."""
    if is_object(value):
        return value.get("count", "…")
    return len(value) if is_array(value) else value
