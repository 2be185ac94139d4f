"""`recapd update`: change what a session is called, and when it is compacted unasked."""

from typing import Literal

import click
import msgspec
from msgspec import UNSET, UnsetType

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import NewAutoCompact, UpdateParams


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
@click.option("--title", help="What it is called.  ['' clears]")
@click.option("--cwd", help="The folder that it is about.  ['' clears]")
@click.option("--state", type=click.Choice(["active", "archived"]))
@click.option(
    "--auto-compact-at",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    help="Compact it unasked as soon as it has so many; 0: not any more.",
)
@click.option(
    "--keep-recent-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Then keep as many of the latest entries as fit into so many.",
)
def command(
    session_id: str,
    title: str | None,
    cwd: str | None,
    state: Literal["active", "archived"] | None,
    auto_compact_at: int | None,
    keep_recent_tokens: int,
) -> None:
    """Change a session's own fields; what is not named stays as it is."""
    if keep_recent_tokens and not auto_compact_at:
        raise click.UsageError("--keep-recent-tokens goes with --auto-compact-at.")
    auto_compact: NewAutoCompact | UnsetType | None = UNSET
    if auto_compact_at is not None:
        auto_compact = (
            NewAutoCompact(at_tokens=auto_compact_at, keep_recent_tokens=keep_recent_tokens)
            if auto_compact_at
            else None
        )
    params = UpdateParams(
        session_id=session_id,
        title=UNSET if title is None else title or None,
        cwd=UNSET if cwd is None else cwd or None,
        state=UNSET if state is None else state,
        auto_compact=auto_compact,
    )

    async def update(client: Client) -> msgspec.Raw:
        return await client.call("session.update", params)

    result = run_client(update)
    if current_options().json:
        write_json(result)
