"""Keys of providers: read when a model is asked, and shown to nobody else."""

import os
import signal
import stat
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NoReturn

import anyio
import anyio.to_thread

from recapd.daemon.compaction.summarise.settings import OnlineSettings
from recapd.protocol.errors import CompactionFailed

KEY_BYTES_MAX: Final = 16_384
"""A token of an identity provider has a few thousand."""

_OUTPUT_BYTES_MAX: Final = KEY_BYTES_MAX + 2  # a line end more
_COMMAND_TIMEOUT_S: Final = 30.0  # a password manager may ask for a finger


class Key:
    """A key, which neither `repr` nor `str` nor a copy in a log shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return "Key(…)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not written anywhere")

    def reveal(self) -> str:
        """The key itself, for the header that shows it to the provider."""
        return self._text


async def read_key(
    settings: OnlineSettings, environment: Mapping[str, str] = os.environ
) -> Key | None:
    """The key from where the settings say it is; None where they name no place.

    Raises:
        CompactionFailed: it cannot be read or is no key (stage `configure`).
    """
    if settings.key_env:
        value = environment.get(settings.key_env)
        if value is None:
            raise _failed("The variable that `key_env` names is not set.")
        return _key(value.encode("utf-8", "surrogateescape"))
    if settings.key_file is not None:
        return _key(await anyio.to_thread.run_sync(_read_private, settings.key_file))
    if settings.key_command:
        return _key(await _output_of(settings.key_command))
    return None


def _key(text: bytes) -> Key:
    text = text.strip()
    # httpx and h11 repeat a header's value where they refuse it: it must not come to that.
    if not text or len(text) > KEY_BYTES_MAX or not all(0x21 <= byte <= 0x7E for byte in text):
        raise _failed("The key is empty, too long, or has other than visible ASCII characters.")
    return Key(text.decode("ascii"))


def _read_private(path: Path) -> bytes:
    try:
        # Opened before it is looked at, so that what is read is what was checked.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _failed("`key_file` is not a file.")
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise _failed("`key_file` must belong to this user, with mode 0600.")
            return file.read(KEY_BYTES_MAX + 1)
    except OSError as error:
        raise _failed("`key_file` cannot be read.") from error


async def _output_of(command: tuple[str, ...]) -> bytes:
    """What it prints. It has a session of its own, so that what it started ends with it."""
    try:
        with anyio.fail_after(_COMMAND_TIMEOUT_S):
            async with await anyio.open_process(
                command,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            ) as process:
                assert process.stdout is not None
                output = b""
                try:
                    async for piece in process.stdout:
                        output += piece
                        if len(output) > _OUTPUT_BYTES_MAX:
                            raise ValueError
                    code = await process.wait()
                except BaseException:
                    # Before it is waited for, so that nobody else can have its number.
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    raise
                if code != 0:
                    raise ValueError
                return output
    except (OSError, TimeoutError, ValueError) as error:
        # The cause would hold what the command printed.
        name = type(error).__name__
        raise _failed("`key_command` failed.") from RuntimeError(name)


def _failed(hint: str) -> CompactionFailed:
    return CompactionFailed(stage="configure", hint=hint)
