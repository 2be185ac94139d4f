"""`recapd restore-backup`: put back a copy of the store."""

from pathlib import Path

import click

from recapd.daemon.cli import ClientCommand, current_options
from recapd.daemon.terminal import sized, write_json


@click.command("restore-backup", cls=ClientCommand)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--replace", is_flag=True, help="Also over a store that has sessions.")
def command(folder: Path, replace: bool) -> None:
    """Make the store what it was when `recapd backup DIR` was run.

    No daemon may serve it meanwhile. All of DIR is verified first; a copy that was not made by
    `recapd backup`, or not to its end, is refused. A crash leaves the old store or the new one.
    """
    import msgspec

    from recapd.daemon.local import failures
    from recapd.storage.backup import restore_backup

    options = current_options()
    with failures():
        manifest = restore_backup(folder, options.settings().data_dir, replace=replace)
    if options.json:
        write_json(msgspec.json.encode(manifest))
    else:
        click.echo(
            f"sessions: {manifest.sessions}, archives: {manifest.archives},"
            f" {sized(manifest.bytes)}, as of {manifest.made_at}"
        )
