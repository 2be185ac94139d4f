"""`recapd compact`: replace a history by a summary, and archive it."""

import sys
from contextlib import suppress
from typing import TextIO, get_args

import anyio
import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client, ClientError, Subscription
from recapd.protocol.errors import RpcError
from recapd.protocol.messages import (
    CompactionProgress,
    CompactParams,
    CompactResult,
    Summarizer,
    Tokens,
)


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
@click.option(
    "--keep-recent-tokens",
    type=click.IntRange(min=0),
    default=0,
    help="Keep as many of the latest entries as fit into so many tokens.",
)
@click.option(
    "--fold-reminders",
    is_flag=True,
    help="Summarise reminders that leave no room.",
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be kept and summarised.")
@click.option("--force", is_flag=True, help="Even where there is nothing to summarise.")
@click.option("--no-wait", is_flag=True, help="Print the operation's id and wait for nothing.")
@click.option(
    "--summary",
    type=click.File(encoding="utf-8"),
    help="The summary itself (`-`: standard input); none is made then.",
)
@click.option(
    "--summarizer",
    type=click.Choice(get_args(Summarizer)),
    help="What makes the summary; all but `offline` ask a model, which the daemon's file names.",
)
@click.option("--instructions", help="What matters most in the summary.")
@click.option("--relevance", is_flag=True, help="Let the model leave out what it finds irrelevant.")
def command(
    session_id: str,
    keep_recent_tokens: int,
    fold_reminders: bool,
    dry_run: bool,
    force: bool,
    no_wait: bool,
    summary: TextIO | None,
    summarizer: Summarizer | None,
    instructions: str | None,
    relevance: bool,
) -> None:
    """Archive the history of a session and replace it by a summary.

    Instructions and the latest reminders stay. Ctrl-C cancels, and leaves the history as it was.
    """
    params = CompactParams(
        session_id=session_id,
        summary=None if summary is None else summary.read(),
        summarizer=summarizer,
        instructions=instructions,
        relevance=relevance,
        keep_recent_tokens=keep_recent_tokens,
        fold_reminders=fold_reminders,
        dry_run=dry_run,
        force=force,
        wait=not no_wait,
    )
    draw = sys.stderr.isatty() and not no_wait and not current_options().json

    async def compact(client: Client) -> msgspec.Raw:
        if not draw:
            return await client.call("session.compact", params)
        raised: Exception | None = None
        async with (
            client.subscribe(session_id, events=["compaction.progress"]) as events,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(_draw, events)
            try:
                return await client.call("session.compact", params)
            except (RpcError, ClientError) as error:
                raised = error  # the task group would put it into an ExceptionGroup
            finally:
                tasks.cancel_scope.cancel()
        assert raised is not None
        raise raised

    result = run_client(compact)
    if current_options().json:
        write_json(result)
        return
    for line in _lines(msgspec.json.decode(result, type=CompactResult)):
        click.echo(line)


async def _draw(events: Subscription) -> None:
    """Draw on stderr how far it is, until cancelled."""
    with suppress(RpcError, ClientError):  # then without: the answer will say what is wrong
        told = await _next(events)
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("")
            while True:
                progress.update(task, description=told.stage, completed=told.done, total=told.total)
                told = await _next(events)


async def _next(events: Subscription) -> CompactionProgress:
    while True:
        notice = await anext(events)
        if notice.method == "compaction.progress":
            return msgspec.json.decode(notice.params, type=CompactionProgress)


def _lines(result: CompactResult) -> list[str]:
    if result.plan is not msgspec.UNSET:
        return [
            f"{name}: {len(part.entry_ids)} entries, {_count(part.tokens)} tokens"
            for name, part in (
                ("instructions, kept", result.plan.instructions),
                ("reminders, kept", result.plan.reminders),
                ("latest, kept", result.plan.tail),
                ("summarised", result.plan.summarised),
                ("older reminders, left out", result.plan.dropped),
            )
        ]
    if result.status == "running":
        return [str(result.operation_id)]
    asked = "" if not result.attempts else f", {result.quality}, attempts: {result.attempts}"
    return [
        f"revision {result.session.revision}, the one before is archived:"
        f" {result.archived_revision}",
        f"{result.entries_before} entries, now {result.entries_after};"
        f" {_count(result.tokens_before)} tokens, now {_count(result.tokens_after)}{asked}",
    ]


def _count(tokens: Tokens | msgspec.UnsetType) -> str:
    return "?" if tokens is msgspec.UNSET else f"{'' if tokens.exact else 'about '}{tokens.count}"
