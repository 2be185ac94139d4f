"""`recapd stop`: end the daemon."""

import os
from typing import Final

import anyio
import click

from recapd.daemon.cli import ClientCommand, Failure, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client, NotConnected
from recapd.protocol.messages import ShutdownParams

_EXIT_TIMEOUT_S: Final = 20  # beyond the time to drain: for closing the store


@click.command(cls=ClientCommand)
@click.option("--now", is_flag=True, help="Wait for nothing that is under way.")
def command(now: bool) -> None:
    """Stop the daemon, and wait until it has ended.

    What is under way may end first. Nothing that was acknowledged is lost either way.
    """
    options = current_options()
    timeout_s = options.settings().drain_timeout_s + _EXIT_TIMEOUT_S

    async def stop(client: Client) -> None:
        process = _open_process(client.server.server.pid)
        try:
            result = await client.call(
                "server.shutdown", ShutdownParams(mode="now" if now else "drain")
            )
            if process is not None:
                with anyio.move_on_after(timeout_s) as scope:
                    await anyio.wait_readable(process)
                if scope.cancelled_caught:
                    raise Failure(f"The daemon has not ended after {timeout_s} s.")
        finally:
            if process is not None:
                os.close(process)
        if options.json:
            write_json(result)
        else:
            click.echo("recapd has stopped")

    try:
        run_client(stop, may_start=False)
    except NotConnected:
        click.echo("No daemon runs.", err=True)
        if options.json:
            write_json(b'{"stopping":false}')


def _open_process(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends (pidfd_open(2)).

    None where it cannot be seen from here, in another namespace.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
