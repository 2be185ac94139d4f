"""Start a daemon in the background and wait until it is ready, without asking it over and over.

The daemon gets the writing end of a pipe (`--ready-fd`): a line says that it takes connections, the
end of the pipe without one that it does not.
"""

import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from recapd.daemon.cli import ExitCode, Failure
from recapd.daemon.config import Settings
from recapd.protocol.client import NotConnected
from recapd.storage.errors import Unsafe
from recapd.storage.lock import UnsafeFolder, make_private_folder, open_private

START_TIMEOUT_S: Final = 10
LOG_NAME: Final = "recapd.log"

_LOG_BYTES_MAX: Final = 4 << 20
_PAUSE_S: Final = 0.2
# Before another attempt where another daemon holds the store but does not listen: it is starting at
# this very moment, or stopping. There is nothing of it to wait for but its lock.


def listens(path: Path) -> bool:
    """Whether somebody listens at the socket. Raises NotConnected where that may not be asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except PermissionError as error:
            raise NotConnected("the socket may not be used by this user") from error
        except OSError:
            return False
    return True


def ensure_daemon(settings: Settings) -> bool:
    """Start a daemon unless one listens; whether one was started.

    Raises Failure when none listens within START_TIMEOUT_S. What was started goes on.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not listens(settings.socket):
        if _start(settings, deadline_s):
            return True
        if time.monotonic() + _PAUSE_S > deadline_s:
            raise Failure(
                "Another daemon holds the store and does not listen at the socket.",
                ExitCode.NO_DAEMON,
            )
        time.sleep(_PAUSE_S)
    return False


def _start(settings: Settings, deadline_s: float) -> bool:
    """Start one; False where another was there first. Raises Failure."""
    try:
        make_private_folder(settings.data_dir)
        log = _open_log(settings.data_dir / LOG_NAME)
    except (Unsafe, UnsafeFolder) as error:
        raise Failure(
            "A folder or file of the store is not private to this user.", ExitCode.CANNOT_SERVE
        ) from error
    except OSError as error:
        raise Failure(
            f"The folder of the store cannot be used: {os.strerror(error.errno or 0)}.",
            ExitCode.CANNOT_SERVE,
        ) from error
    ready, writing = os.pipe()
    try:
        logged_bytes = os.fstat(log).st_size
        try:
            process = _spawn(settings, writing, log)
        finally:
            os.close(writing)
        timeout_s = max(deadline_s - time.monotonic(), 0)
        if not select.select([ready], [], [], timeout_s)[0]:
            raise Failure(
                f"The daemon is not ready after {START_TIMEOUT_S} s; it is still starting.",
                ExitCode.NO_DAEMON,
                hint=f"{LOG_NAME} in the folder of the store may say why.",
            )
        if os.read(ready, 1):
            return True
        code = process.wait()
        if code == ExitCode.ALREADY_SERVED:
            return False
        raise Failure(
            f"The daemon did not start: {_last_words(settings.data_dir / LOG_NAME, logged_bytes)}",
            ExitCode.CANNOT_SERVE if code == ExitCode.CANNOT_SERVE else ExitCode.NO_DAEMON,
            hint=f"{LOG_NAME} in the folder of the store has what it said.",
        )
    finally:
        os.close(ready)
        os.close(log)


def _spawn(settings: Settings, ready_fd: int, log: int) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "RECAPD_TOKEN"}
    if home := environment.get("RECAPD_HOME"):
        environment["RECAPD_HOME"] = os.path.abspath(home)
    # -P: what lies in the current folder is not imported.
    program = [sys.executable, "-P", "-m", "recapd.daemon", "serve"]
    program += ["--data-dir", str(settings.data_dir), "--socket", str(settings.socket)]
    return subprocess.Popen(
        [*program, "--ready-fd", str(ready_fd)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        pass_fds=(ready_fd,),
        cwd=settings.data_dir,  # not the current folder, which it would keep in use
        env=environment,
        start_new_session=True,
    )


def _open_log(path: Path) -> int:
    log = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.fchmod(log, 0o600)
    if os.fstat(log).st_size > _LOG_BYTES_MAX:
        os.close(log)
        os.replace(path, path.with_name(f"{path.name}.1"))
        log = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    return log


def _last_words(path: Path, start: int) -> str:
    """What the daemon said about itself on stderr: its lines are constants and hold no paths."""
    with path.open("rb") as log:
        log.seek(start)
        lines = log.read(1 << 16).decode(errors="replace").splitlines()
    said = [line.removeprefix("recapd: ") for line in lines if line.startswith("recapd: ")]
    return f"{said[-1]}." if said else "it ended at once."
