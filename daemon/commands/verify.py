"""`recapd verify`: is what is stored what was written?"""

import re

import click
import msgspec

from recapd.daemon.cli import ClientCommand, Failure, current_options, run_client
from recapd.daemon.terminal import sized, table, write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import Share, VerifyParams, VerifyResult


def _share(ctx: click.Context, param: click.Parameter, value: str | None) -> Share | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", value)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise click.BadParameter("it is like 1/4: the first of four shares", ctx, param)
    return Share(int(found[1]), int(found[2]))


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="[SESSION]", required=False)
@click.option("--read-data", is_flag=True, help="Read every byte, and hash every archive.")
@click.option(
    "--subset", "share", callback=_share, metavar="N/T", help="Read the N-th of T shares only."
)
def command(session_id: str | None, read_data: bool, share: Share | None) -> None:
    """Check a session, or all of them.

    Without an option: whether every row and every archive file is there. Ends with 1 when
    something is wrong. `--subset 1/7` today and `2/7` tomorrow read everything within a week.
    """

    async def fetch(client: Client) -> msgspec.Raw:
        params = VerifyParams(session_id=session_id, read_data=read_data, share=share)
        return await client.call("session.verify", params)

    raw = run_client(fetch)
    result = msgspec.json.decode(raw, type=VerifyResult)
    if current_options().json:
        write_json(raw)
    else:
        rows = [
            (one.session_id, "" if one.revision is None else str(one.revision), one.kind)
            for one in result.faults
        ]
        for line in table(("SESSION", "REVISION", "FAULT"), rows) if rows else ():
            click.echo(line)
        click.echo(f"{result.checked} histories checked, {sized(result.bytes)} read")
    if result.faults_total:
        raise Failure(f"{result.faults_total} fault{'s' * (result.faults_total != 1)}")
