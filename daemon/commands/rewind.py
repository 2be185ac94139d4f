"""`recapd rewind`: drop the later entries of a history."""

import click
import msgspec

from recapd.daemon.cli import ClientCommand, run_client
from recapd.daemon.commands.restore import say_what_was_replaced
from recapd.protocol.client import Client
from recapd.protocol.messages import RewindParams


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
@click.argument("entry_id", metavar="ENTRY", type=click.IntRange(min=0))
def command(session_id: str, entry_id: int) -> None:
    """Drop every entry of a session behind ENTRY; all of them, if ENTRY is 0.

    The present history is archived first: `recapd restore` brings it back.
    """

    async def rewind(client: Client) -> msgspec.Raw:
        params = RewindParams(session_id=session_id, after_entry_id=entry_id)
        return await client.call("session.rewind", params)

    say_what_was_replaced(run_client(rewind))
