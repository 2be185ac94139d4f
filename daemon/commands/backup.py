"""`recapd backup`: a copy of the store that can be put back."""

import time
from pathlib import Path

import click

import recapd
from recapd.daemon.cli import ClientCommand, current_options
from recapd.daemon.terminal import sized, write_json


@click.command(cls=ClientCommand)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def command(folder: Path) -> None:
    """Copy the whole store into DIR, which is made or is empty.

    A daemon may serve meanwhile; none is started. Every byte is read back and verified before this
    ends with 0. What is stored is not redacted: keep DIR as private as the store.
    """
    import msgspec

    from recapd.daemon.local import failures
    from recapd.storage.backup import make_backup

    options = current_options()
    with failures():
        manifest = make_backup(
            options.settings().data_dir,
            folder,
            recapd=recapd.__version__,
            now_ms=lambda: time.time_ns() // 1_000_000,
        )
    if options.json:
        write_json(msgspec.json.encode(manifest))
    else:
        click.echo(
            f"sessions: {manifest.sessions}, archives: {manifest.archives},"
            f" {sized(manifest.bytes)}, all verified"
        )
