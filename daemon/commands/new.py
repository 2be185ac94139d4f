"""`recapd new`: make a session."""

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import CreateParams, CreateResult, NewAutoCompact


def parse_labels(
    context: click.Context, parameter: click.Parameter, value: tuple[str, ...]
) -> dict[str, str]:
    """`NAME=VALUE`, any number of times."""
    labels: dict[str, str] = {}
    for label in value:
        name, equals, text = label.partition("=")
        if not equals or not name:
            raise click.BadParameter("a label is NAME=VALUE")
        labels[name] = text
    return labels


@click.command(cls=ClientCommand)
@click.option("--id", "session_id", help="Its id; the daemon makes one if absent.")
@click.option("--title", help="What it is called.")
@click.option("--cwd", help="The folder that it is about.")
@click.option(
    "--label",
    "labels",
    multiple=True,
    callback=parse_labels,
    metavar="NAME=VALUE",
    help="Repeatable.",
)
@click.option(
    "--auto-compact-at",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Compact it unasked as soon as it has so many.",
)
@click.option("--transient", is_flag=True, help="Gone when the daemon ends.")
def command(
    session_id: str | None,
    title: str | None,
    cwd: str | None,
    labels: dict[str, str],
    auto_compact_at: int | None,
    transient: bool,
) -> None:
    """Make a session and print its id."""
    params = CreateParams(
        session_id=session_id,
        title=title,
        cwd=cwd,
        labels=labels,
        durability="transient" if transient else "durable",
        auto_compact=(
            None if auto_compact_at is None else NewAutoCompact(at_tokens=auto_compact_at)
        ),
    )

    async def create(client: Client) -> None:
        result = await client.call("session.create", params)
        if current_options().json:
            write_json(result)
        else:
            click.echo(msgspec.json.decode(result, type=CreateResult).session_id)

    run_client(create)
