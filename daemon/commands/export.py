"""`recapd export`: a history as text, to stdout or into a file."""

import os
import stat
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import click
import msgspec

from recapd.daemon.cli import ClientCommand, Failure, current_options, run_client
from recapd.daemon.terminal import write_json
from recapd.protocol.client import Client
from recapd.protocol.messages import Format, Manifest


def _parse_revision(context: click.Context, parameter: click.Parameter, value: str) -> int | str:
    if value in ("current", "all"):
        return value
    if value.isdecimal():
        return int(value)
    raise click.BadParameter("a revision is a number, `current` or `all`")


@click.command(cls=ClientCommand)
@click.argument("session_id", metavar="SESSION")
@click.option(
    "--revision",
    callback=_parse_revision,
    default="current",
    metavar="N|current|all",
    help="An archived one, the present one, or all.  [current]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "json", "markdown"]),
    help="One item a line, one document, or text to read.  [jsonl]",
)
@click.option("--no-redact", is_flag=True, help="Leave in what looks like a secret.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write this file: whole or not at all, readable by you only.",
)
def command(
    session_id: str,
    revision: int | Literal["current", "all"],
    form: Format | None,
    no_redact: bool,
    output: Path | None,
) -> None:
    """Export a history. Secrets are replaced unless told otherwise.

    With --json, what goes to stdout is the export as one JSON document, or with -o its manifest.
    """
    as_json = current_options().json
    if as_json and output is None:
        if form not in (None, "json"):
            raise click.UsageError("--json to stdout is --format json.")
        form = "json"

    async def export(client: Client) -> Manifest | None:
        chunks = client.export(
            session_id,
            revision=revision,
            format=form or "jsonl",
            redact="none" if no_redact else "policy",
        )
        with _written(output) as write:
            async for chunk in chunks:
                write(chunk.encode())
            if as_json and output is None:
                write(b"\n")
        return chunks.manifest

    manifest = run_client(export)
    if manifest is None:
        return
    if as_json and output is not None:
        write_json(msgspec.json.encode(manifest))
    replaced = ", ".join(f"{name} {count}" for name, count in manifest.redaction.counts.items())
    if replaced:
        click.echo(f"Replaced: {replaced}. --no-redact leaves them in.", err=True)


@contextmanager
def _written(path: Path | None) -> Generator[Callable[[bytes], object]]:
    """Write to stdout, or to a new file that takes the name only when the block has ended well.

    Then the file and its name are on the disk. After a fault or a cancel nothing has changed.
    """
    if path is None:
        yield sys.stdout.buffer.write
        sys.stdout.buffer.flush()
        return
    try:
        status = path.lstat()
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISREG(status.st_mode):
            raise Failure("What lies at the name of the output is no file.")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(part, flags, 0o600), "wb") as file:
        try:
            yield file.write
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            part.unlink()
            raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
