"""The command line: what all commands share. Each is a module of `commands/`, loaded when called.

Exit codes::

    0    done
    1    the request was refused or failed; the reason is on stderr
    2    usage: the command line or a setting cannot be used
    3    no daemon runs, or it cannot be reached
    4    serve, restore-backup: another daemon serves this store or socket
    5    serve, backup, restore-backup: the store cannot be served (damaged, of a newer recapd, not
         private to its owner)
    130  interrupted

Client commands start a daemon where none runs. What they import is kept small, for the time it
takes: no store, no JSON-RPC server, no HTTP client, no tokeniser; `rich` only to draw.
"""

import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

import recapd
from recapd.daemon.config import ConfigError, Settings, resolve

if TYPE_CHECKING:
    from recapd.protocol.client import Client

T = TypeVar("T")

_PATIENCE_S: Final = 10
_TOKEN_BYTES_MAX: Final = 500


class ExitCode(IntEnum):
    """See the module."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 3
    ALREADY_SERVED = 4
    CANNOT_SERVE = 5
    INTERRUPTED = 130


class Failure(Exception):
    """Ends the command with this exit code; what is said goes to stderr, as JSON with `--json`."""

    def __init__(
        self,
        message: str,
        exit_code: ExitCode = ExitCode.FAILED,
        *,
        hint: str | None = None,
        error: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self._hint = hint
        self._error = error or {"message": message, "data": {"reason": exit_code.name.lower()}}

    def show(self) -> None:
        if current_options().json:
            click.echo(json.dumps({"error": self._error}), err=True)
            return
        click.echo(f"{click.style('recapd:', fg='red')} {self}", err=True)
        if self._hint is not None:
            click.echo(f"  {self._hint}", err=True)


@dataclass(slots=True)
class Options:
    """What may stand before or behind the name of a command."""

    socket: Path | None = None
    data_dir: Path | None = None
    token_file: Path | None = None
    no_start: bool = False
    json: bool = False

    def settings(self, **flags: object) -> Settings:
        """Raises ConfigError."""
        return resolve({"socket": self.socket, "data_dir": self.data_dir} | flags)

    def token(self) -> str | None:
        """What is presented to the daemon. Never an argument, which every process could read.

        Raises Failure, OSError.
        """
        if self.token_file is None:
            return os.environ.get("RECAPD_TOKEN") or None
        with self.token_file.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise Failure("Others may read the file of the token.", ExitCode.USAGE)
            return file.read(_TOKEN_BYTES_MAX).decode(errors="replace").strip()


def _remember(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    options = context.ensure_object(Options)  # the group's, where it has one
    if value:
        setattr(options, str(parameter.name), value)


def _shared(name: str, text: str, **kind: Any) -> click.Option:
    return click.Option([name], help=text, expose_value=False, callback=_remember, **kind)


_PATH: Final = click.Path(path_type=Path)

_SHARED: Final = (
    _shared("--socket", "Path of the daemon's socket.  [RECAPD_SOCKET]", type=_PATH),
    _shared("--data-dir", "Folder of the store.  [RECAPD_DATA_DIR]", type=_PATH),
    _shared("--token-file", "File with a token to present.  [RECAPD_TOKEN]", type=_PATH),
    _shared("--no-start", "Start no daemon where none runs.", is_flag=True),
    _shared("--json", "Data as JSON on stdout, all talk on stderr.", is_flag=True),
)


class ClientCommand(click.Command):
    """A command that takes the shared options behind its name, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _SHARED


_COMMANDS: Final = (
    *("serve", "start", "stop", "status"),
    *("new", "list", "append", "show", "compact", "revisions", "restore", "rewind", "fork"),
    *("export", "watch", "verify", "delete", "update", "call"),
    *("token", "backup", "restore-backup"),
)


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(
            f"recapd.daemon.commands.{cmd_name.replace('-', '_')}"
        ).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, and say in our own words how it ended."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError as error:
            # Whoever reads has had enough. What is left in the buffer has no way to go.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(ExitCode.DONE) from error
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (KeyboardInterrupt, click.Abort) as error:
            raise click.exceptions.Exit(ExitCode.INTERRUPTED) from error
        except Exception as error:
            failure = failure_of(error)
            if failure is None:
                raise
            failure.show()
            raise click.exceptions.Exit(failure.exit_code) from error


def failure_of(error: Exception) -> Failure | None:
    """What is said of an error, never a path of the server or the text of a session.

    None for one that is a fault of this program.
    """
    from recapd.protocol.client import BadAnswer, ConnectionLost, NotConnected
    from recapd.protocol.errors import RpcError

    match error:
        case RpcError():
            said = f"{error.message} ({', '.join([error.reason, *_details(error.data)])})"
            return Failure(said, hint=error.hint, error=error.to_wire())
        case ConfigError():
            return Failure(f"{error}.", ExitCode.USAGE)
        case NotConnected():
            hint = "`recapd start` starts a daemon, `recapd status` asks for it."
            return Failure(f"{error}.".capitalize(), ExitCode.NO_DAEMON, hint=hint)
        case ConnectionLost():
            hint = "What was asked for may have been done all the same."
            return Failure(f"{error}.".capitalize(), ExitCode.NO_DAEMON, hint=hint)
        case BadAnswer():
            return Failure("What listens at the socket is no recapd.", ExitCode.NO_DAEMON)
        case OSError():
            return Failure(os.strerror(error.errno) if error.errno else type(error).__name__)
        case Failure():
            return error
        case _:
            return None


def _details(data: dict[str, Any]) -> Iterator[str]:
    for name, value in data.items():
        if name == "errors":
            yield from (f"{one['path']}: expected {one['expected']}" for one in value)
        else:
            yield f"{name}={value}"


@click.command(
    cls=_Commands,
    params=list(_SHARED),
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Exit codes:
  0    done
  1    the request was refused or failed; the reason is on stderr
  2    usage: the command line or a setting cannot be used
  3    no daemon runs, or it cannot be reached
  4    serve, restore-backup: another daemon serves this store or socket
  5    the store cannot be served (damaged, newer, not private)
  130  interrupted

Settings come from defaults, recapd.toml, the environment and flags; `recapd serve --help` lists
them. RECAPD_HOME puts configuration, data and socket into one folder. NO_COLOR is honoured.
""",
)
@click.version_option(recapd.__version__, message="recapd %(version)s")
@click.pass_context
def group(context: click.Context) -> None:
    """Keep, compact and archive the histories of AI agents.

    Every command but `serve`, `stop`, `status`, `backup` and `restore-backup` starts a daemon where
    none runs.
    """
    context.ensure_object(Options)
    if os.environ.get("NO_COLOR"):
        context.color = False


def main() -> None:
    """Run the command line and exit. Never returns."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a real stream
    group(prog_name="recapd")


def current_options() -> Options:
    """The shared options of the command that runs."""
    return click.get_current_context().ensure_object(Options)


def run_client(body: "Callable[[Client], Awaitable[T]]", *, may_start: bool = True) -> T:
    """Run `body` with a client of the daemon, which is started where none runs.

    Raises what `connect` and `body` raise; Failure where a daemon could not be started.
    """
    import anyio

    from recapd.protocol.client import Patience, connect

    options = current_options()
    settings = options.settings()
    token = options.token()
    if may_start and not options.no_start:
        from recapd.daemon.launch import ensure_daemon

        ensure_daemon(settings)

    async def run() -> T:
        async with connect(
            settings.socket,
            name="recapd",
            version=recapd.__version__,
            token=token,
            patience=Patience(total_s=_PATIENCE_S),
        ) as client:
            return await body(client)

    return anyio.run(run)
