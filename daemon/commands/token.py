"""`recapd token`: let another program do less than its owner may."""

import re
import sys
from typing import Final

import click
import msgspec

from recapd.daemon.cli import ClientCommand, Failure, current_options, run_client
from recapd.daemon.terminal import one_line, table, write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import (
    Params,
    TokenCreateParams,
    TokenCreateResult,
    TokenListResult,
    TokenRevokeParams,
    TokenRevokeResult,
)
from recapd.protocol.methods import SCOPES, Scope

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LABEL_WIDTH: Final = 40


def _parse_time(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    if value is None:
        return None
    found = re.fullmatch(r"([1-9]\d{0,8})([smhd])", value)
    if found is None:
        raise click.BadParameter("it is like 90s, 15m, 8h or 30d", context, parameter)
    return int(found[1]) * _UNITS_S[found[2]]


@click.group()
def command() -> None:
    """Tokens, for programs that are to do less than you may.

    A program presents its token from a file (`--token-file`) or in RECAPD_TOKEN.
    """


@command.command(cls=ClientCommand)
@click.argument("label")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice(SCOPES),
    help="What it may do.  Repeatable.",
)
@click.option(
    "--session", "sessions", multiple=True, metavar="SESSION", help="Only this one.  Repeatable."
)
@click.option(
    "--expires-in", "ttl_s", callback=_parse_time, metavar="TIME", help="Like 8h or 30d.  [never]"
)
def create(
    label: str, scopes: tuple[Scope, ...], sessions: tuple[str, ...], ttl_s: int | None
) -> None:
    """Make a token and print it, this once."""
    params = TokenCreateParams(
        label=label, scopes=[*scopes], sessions=[*sessions] or None, ttl_s=ttl_s
    )

    async def ask(client: Client) -> None:
        result = await client.call("token.create", params)
        if current_options().json:
            write_json(result)
            return
        made = msgspec.json.decode(result, type=TokenCreateResult)
        click.echo(made.token)
        click.echo(f"`recapd token revoke {made.token_id}` ends it.", err=True)

    run_client(ask)


@command.command("list", cls=ClientCommand)
def list_tokens() -> None:
    """Show what tokens there are, without what is secret."""

    async def ask(client: Client) -> None:
        result = await client.call("token.list", Params())
        if current_options().json:
            write_json(result)
            return
        rows = [
            (
                token.token_id,
                one_line(token.label, _LABEL_WIDTH),
                token.expires_at or "never",
                "all" if token.sessions is None else " ".join(token.sessions),
                " ".join(token.scopes),
            )
            for token in msgspec.json.decode(result, type=TokenListResult).tokens
        ]
        for line in table(("TOKEN", "LABEL", "EXPIRES", "SESSIONS", "SCOPES"), rows):
            click.echo(line)

    run_client(ask)


@command.command(cls=ClientCommand)
@click.argument("token_id", metavar="TOKEN", required=False)
@click.option(
    "--stdin", is_flag=True, help="Read the token itself from stdin, where its id is not known."
)
def revoke(token_id: str | None, *, stdin: bool) -> None:
    """End a token, and those made with it, at once.

    TOKEN is the first column of `recapd token list`.
    """
    if (token_id is None) != stdin:
        raise click.UsageError("Give the TOKEN's id, or --stdin.")
    token = sys.stdin.read().strip() if stdin else None

    async def ask(client: Client) -> None:
        params = TokenRevokeParams(token_id=token_id, token=token)
        result = await client.call("token.revoke", params)
        if not msgspec.json.decode(result, type=TokenRevokeResult).revoked:
            raise Failure("There is no such token.")
        if current_options().json:
            write_json(result)

    run_client(ask)
