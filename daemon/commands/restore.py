"""`recapd restore`: put an archived history in place of the present one."""

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import ReplaceResult, RestoreParams


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
@click.argument("revision", type=click.IntRange(min=0))
def command(session_id: str, revision: int) -> None:
    """Put an archived REVISION in place of the history of a session.

    The present history is archived first, so a restore can be taken back by another. `recapd
    revisions` lists what is archived.
    """

    async def restore(client: Client) -> msgspec.Raw:
        params = RestoreParams(session_id=session_id, revision=revision)
        return await client.call("session.restore", params)

    say_what_was_replaced(run_client(restore))


def say_what_was_replaced(result: msgspec.Raw) -> None:
    """Write the result of a restore or a rewind."""
    if current_options().json:
        write_json(result)
        return
    told = msgspec.json.decode(result, type=ReplaceResult)
    if told.archived_revision is None:
        click.echo(f"revision {told.session.revision} has that history already")
        return
    click.echo(
        f"revision {told.session.revision}, the one before is archived: {told.archived_revision}\n"
        f"{told.entries_before} entries, now {told.entries_after}"
    )
