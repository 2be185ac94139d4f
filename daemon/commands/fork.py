"""`recapd fork`: make a session out of another one's history."""

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import ForkParams, SessionResult


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
@click.option(
    "--revision", type=click.IntRange(min=0), help="An archived revision, not the present one."
)
@click.option(
    "--after",
    "entry_id",
    metavar="ENTRY",
    type=click.IntRange(min=0),
    help="Take the entries up to this one; none, if it is 0.",
)
@click.option("--id", "new_session_id", help="Its id; the daemon makes one if absent.")
@click.option("--title", help="What it is called; as the other one, if absent.")
def command(
    session_id: str,
    revision: int | None,
    entry_id: int | None,
    new_session_id: str | None,
    title: str | None,
) -> None:
    """Make a session with the entries of another and print its id.

    From then on neither has to do with the other.
    """
    params = ForkParams(
        session_id=session_id,
        revision=revision,
        after_entry_id=entry_id,
        new_session_id=new_session_id,
        title=title,
    )

    async def fork(client: Client) -> msgspec.Raw:
        return await client.call("session.fork", params)

    result = run_client(fork)
    if current_options().json:
        write_json(result)
    else:
        click.echo(msgspec.json.decode(result, type=SessionResult).session.session_id)
