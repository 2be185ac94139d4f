"""`recapd list`: which sessions there are."""

from typing import Literal

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.commands.new import parse_labels
from recapd.daemon.terminal import one_line, table, write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import ListFilter, ListParams, Session

_PAGE: int = 1000


class _Page(msgspec.Struct):
    sessions: list[msgspec.Raw]
    next_cursor: str | None


@click.command(cls=ClientCommand)
@click.option("--state", type=click.Choice(["active", "archived"]))
@click.option("--cwd", help="Those about this folder.")
@click.option("--title", help="Those whose title contains this.")
@click.option(
    "--label",
    "labels",
    multiple=True,
    callback=parse_labels,
    metavar="NAME=VALUE",
    help="Repeatable.",
)
@click.option(
    "--sort",
    type=click.Choice(["updated_at", "created_at", "session_id"]),
    default="updated_at",
    show_default=True,
)
@click.option("--order", type=click.Choice(["asc", "desc"]), default="desc", show_default=True)
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--cursor", help="Go on behind an earlier list: its `next_cursor`.")
def command(
    state: Literal["active", "archived"] | None,
    cwd: str | None,
    title: str | None,
    labels: dict[str, str],
    sort: Literal["updated_at", "created_at", "session_id"],
    order: Literal["asc", "desc"],
    limit: int,
    cursor: str | None,
) -> None:
    """List sessions, the latest change first.

    Behind the tokens of a session stands at how many it is compacted unasked.
    """
    chosen = ListFilter(state=state, cwd=cwd, labels=labels, title_contains=title)

    async def gather(client: Client) -> _Page:
        found = _Page([], cursor)
        while True:
            page_limit = min(limit - len(found.sessions), _PAGE)
            params = ListParams(
                filter=chosen, sort=sort, order=order, limit=page_limit, cursor=found.next_cursor
            )
            page = msgspec.json.decode(await client.call("session.list", params), type=_Page)
            found.sessions += page.sessions
            found.next_cursor = page.next_cursor
            if len(found.sessions) >= limit or page.next_cursor is None:
                return found

    found = run_client(gather)
    if current_options().json:
        write_json(msgspec.json.encode(found))
        return
    sessions = [msgspec.json.decode(session, type=Session) for session in found.sessions]
    heads = ("SESSION", "UPDATED", "ENTRIES", "TOKENS", "REVISION", "TITLE")
    for line in table(heads, [_row(session) for session in sessions]):
        click.echo(line)
    if found.next_cursor is not None:
        click.echo(f"There are more: --limit, or --cursor {found.next_cursor}", err=True)


def _row(session: Session) -> tuple[str, ...]:
    title = one_line(session.title or "", 60)
    if session.state == "archived":
        title = f"[archived] {title}"
    tokens = f"{'' if session.tokens.exact else '~'}{session.tokens.count}"
    return (
        session.session_id,
        session.updated_at[:19] + "Z",
        str(session.entries),
        tokens if session.auto_compact is None else f"{tokens}/{session.auto_compact.at_tokens}",
        str(session.revision),
        title,
    )
