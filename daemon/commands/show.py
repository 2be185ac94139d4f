"""`recapd show`: read a history."""

import click
import msgspec

from recapd.daemon.cli import ClientCommand, current_options, run_client
from recapd.daemon.terminal import Write, one_line, pager, printable, width
from recapd.protocol.client import Client
from recapd.protocol.messages import Entry, GetParams, Session

_PAGE_BYTES = 1 << 20


class _Page(msgspec.Struct):
    session: msgspec.Raw
    revision: int
    entries: msgspec.Raw
    next_cursor: str | None
    redaction: msgspec.Raw


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
@click.option("--revision", type=click.IntRange(min=0), help="An archived one.  [the present one]")
@click.option("--full", is_flag=True, help="Whole texts instead of one line for each entry.")
def command(session_id: str, revision: int | None, full: bool) -> None:
    """Show the history of a session, through a pager on a terminal."""
    as_json = current_options().json

    async def fetch(client: Client, cursor: str | None) -> _Page:
        params = GetParams(
            session_id=session_id,
            revision=revision,
            limit=10_000,
            max_bytes=_PAGE_BYTES,
            cursor=cursor,
        )
        return msgspec.json.decode(await client.call("session.get", params), type=_Page)

    async def show(client: Client) -> None:
        page: _Page | None = await fetch(client, None)
        with pager(on=not as_json) as write:
            first = True
            while page is not None:
                if as_json:
                    _write_json(write, page, first)
                else:
                    _write_text(write, page, first, full)
                first = False
                page = await fetch(client, page.next_cursor) if page.next_cursor else None

    run_client(show)


def _write_json(write: Write, page: _Page, first: bool) -> None:
    """Pages as one document; the entries stay the bytes that they are."""
    entries = bytes(page.entries)[1:-1].decode()
    if first:
        session, redaction = bytes(page.session).decode(), bytes(page.redaction).decode()
        write(f'{{"session":{session},"revision":{page.revision},"redaction":{redaction}')
        write(f',"entries":[{entries}')
    elif entries:
        write(f",{entries}")
    if page.next_cursor is None:
        write("]}\n")


def _write_text(write: Write, page: _Page, first: bool, full: bool) -> None:
    # Counts image bytes and reads items: not needed by any other command.
    from recapd.daemon.compaction.transcript import render

    if first:
        write("".join(f"{line}\n" for line in _heading(page)))
    columns = width()
    for entry in msgspec.json.decode(page.entries, type=list[Entry]):
        text = render(bytes(entry.item))
        if entry.reminder is not None:
            text = f"(summary of revision {entry.reminder.archived_revision}) {text}"
        head = f"#{entry.id:<5} "
        if full:
            write(f"{head}{entry.at}\n{printable(text)}\n\n")
        else:
            write(f"{head}{one_line(text, columns - len(head))}\n")


def _heading(page: _Page) -> list[str]:
    session = msgspec.json.decode(page.session, type=Session)
    tokens = f"{'' if session.tokens.exact else 'about '}{session.tokens.count} tokens"
    present = f"at revision {session.revision}, {session.entries} entries, {tokens}"
    title = one_line(session.title or "", width())
    lines = [f"{session.session_id}  {title}".rstrip(), present]
    if session.archived_revisions:
        lines.append(f"archived revisions: {' '.join(map(str, session.archived_revisions))}")
    if session.auto_compact is not None:
        lines.append(f"compacted automatically at {session.auto_compact.at_tokens} tokens")
    if page.revision != session.revision:
        lines.append(f"shown: archived revision {page.revision}")
    return [*lines, ""]
