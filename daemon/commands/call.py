"""`recapd call`: any method of the protocol."""

import sys
from collections.abc import Sequence

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client


@click.command(cls=ClientCommand)
@click.argument("method")
@click.argument("parameters", metavar="[NAME=TEXT|NAME:=JSON]...", nargs=-1)
def command(method: str, parameters: Sequence[str]) -> None:
    """Call a method and print its result as JSON.

    \b
    recapd call session.list limit:=3 'filter:={"state":"active"}'
    recapd call session.update session_id=s1 title='A new title'
    """
    params = _parse(parameters)

    async def call(client: Client) -> msgspec.Raw:
        return await client.call(method, params)

    result = bytes(run_client(call))
    pretty = sys.stdout.isatty() and not current_options().json
    write_json(msgspec.json.format(result) if pretty else result)


def _parse(parameters: Sequence[str]) -> dict[str, object]:
    params: dict[str, object] = {}
    for parameter in parameters:
        name, equals, text = parameter.partition("=")
        if not equals or not name.removesuffix(":"):
            raise click.UsageError("A parameter is NAME=TEXT or NAME:=JSON.")
        if not name.endswith(":"):
            params[name] = text
            continue
        try:
            params[name[:-1]] = msgspec.json.decode(text, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise click.UsageError(f"What follows {name[:-1]}:= is not JSON.") from error
    return params
