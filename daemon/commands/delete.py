"""`recapd delete`: remove a session."""

import sys

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import DeleteParams, DeleteResult


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(session_id: str, yes: bool) -> None:
    """Remove a session and its archives.

    For good. Asks first where standard input is a terminal.
    """
    if not yes and sys.stdin.isatty():
        click.confirm("Remove the session and all its archives?", abort=True, err=True)

    async def delete(client: Client) -> msgspec.Raw:
        return await client.call("session.delete", DeleteParams(session_id=session_id))

    result = run_client(delete)
    deleted = msgspec.json.decode(result, type=DeleteResult).deleted
    if current_options().json:
        write_json(result)
    elif deleted:
        click.echo("deleted")
    if not deleted:
        click.echo("There was no such session.", err=True)
