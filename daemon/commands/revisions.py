"""`recapd revisions`: which histories of a session are archived."""

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import sized, table, write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import RevisionsResult, SessionParams


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
def command(session_id: str) -> None:
    """List the archived revisions of a session, newest first."""

    async def fetch(client: Client) -> msgspec.Raw:
        return await client.call("session.revisions", SessionParams(session_id=session_id))

    result = run_client(fetch)
    if current_options().json:
        write_json(result)
        return
    revisions = msgspec.json.decode(result, type=RevisionsResult).revisions
    rows = [
        (
            str(one.revision),
            one.kind,
            one.archived_at[:19] + "Z",
            str(one.entries),
            f"{'' if one.tokens.exact else '~'}{one.tokens.count}",
            sized(one.bytes),
            one.sha256,
        )
        for one in revisions
    ]
    heads = ("REVISION", "KIND", "ARCHIVED", "ENTRIES", "TOKENS", "SIZE", "SHA256")
    for line in table(heads, rows):
        click.echo(line)
