"""`recapd serve`: be the daemon."""

import os
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from recapd.daemon.cli import current_options
from recapd.daemon.config import Settings, settings_fields


def _options() -> list[click.Parameter]:
    """One flag for each setting. None: not given, so that what stands elsewhere counts."""
    kinds = get_type_hints(Settings)
    options: list[click.Parameter] = []
    for field in settings_fields():
        kind, flag = kinds[field.name], f"--{field.name.replace('_', '-')}"
        settings: dict[str, Any] = {}
        if kind is Path:
            settings["type"] = click.Path(path_type=Path)
        elif kind is bool:
            flag = f"{flag}/--no-{flag[2:]}"
        elif kind is int:
            settings["type"] = int
        elif get_origin(kind) is Literal:
            settings["type"] = click.Choice(get_args(kind))
        text = field.metadata["text"]
        default = "" if kind is Path else f"  [{str(field.default).lower()}]"
        variable = f"  [RECAPD_{field.name.upper()}]"
        options.append(
            click.Option(
                [flag],
                default=None,
                help=f"{text[0].upper()}{text[1:]}.{default}{variable}",
                **settings,
            )
        )
    options.append(
        click.Option(
            ["--ready-fd"],
            type=click.IntRange(min=3),
            help="When connections are taken, write a line to this descriptor and close it.",
        )
    )
    return options


@click.command(params=_options())
def command(ready_fd: int | None, **flags: object) -> None:
    """Be the daemon, in the foreground.

    A signal or `recapd stop` ends it. What it says goes to stderr.
    """
    settings = current_options().settings(
        **{name: value for name, value in flags.items() if value is not None}
    )

    import anyio

    from recapd.daemon.lifecycle import serve
    from recapd.daemon.logs import set_up_logging

    set_up_logging(settings.log_level, settings.log_format)
    code = anyio.run(
        partial(serve, settings, ready=partial(_say_ready, ready_fd)),
        backend_options={"use_uvloop": find_spec("uvloop") is not None},
    )
    raise click.exceptions.Exit(code)


def _say_ready(ready_fd: int | None) -> None:
    if ready_fd is None:
        return
    try:
        os.write(ready_fd, b"ready\n")
        os.close(ready_fd)
    except OSError:
        pass  # whoever wanted to know has gone
