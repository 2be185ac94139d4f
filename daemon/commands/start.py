"""`recapd start`: see to it that a daemon runs."""

import click

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client


@click.command(cls=ClientCommand)
def command() -> None:
    """Start a daemon in the background, unless one runs."""
    from recapd.daemon.launch import ensure_daemon

    options = current_options()
    started = ensure_daemon(options.settings())

    async def tell(client: Client) -> None:
        if options.json:
            write_json(await client.call("server.info"))
            return
        server = client.server.server
        state = "has started" if started else "runs already"
        click.echo(f"recapd {server.version} {state}, process {server.pid}")

    run_client(tell, may_start=False)
