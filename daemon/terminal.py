"""What commands write for people."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

Write = Callable[[str], object]


def printable(text: str) -> str:
    """Text of others, without what a terminal would obey: control characters are shown escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str, width: int) -> str:
    """Text in one line of at most `width` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= width else line[: max(width - 1, 0)] + "…"


def width() -> int:
    """Columns of the terminal; 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100


def counted(number: int, noun: str) -> str:
    """`1 item`, `2 items`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sized(number: int) -> str:
    """A size in bytes: `1.5 MiB`."""
    size = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; the last column may be as wide as it is."""
    every = [heads, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(heads) - 1)]
    for row in every:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[-1]]).rstrip()


def write_json(document: bytes | msgspec.Raw) -> None:
    """One JSON document on stdout, its bytes as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(bytes(document) + b"\n")
    sys.stdout.buffer.flush()


@contextmanager
def pager(*, on: bool = True) -> Generator[Write]:
    """Write through the user's pager on a terminal; straight to stdout elsewhere, or if not `on`.

    Raises BrokenPipeError in the block when the reader has had enough.
    """
    command = shlex.split(os.environ.get("PAGER") or "less")
    if not on or not sys.stdout.isatty() or not command or shutil.which(command[0]) is None:
        yield sys.stdout.write
        return
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="backslashreplace",
        env={"LESS": "FRX"} | os.environ,
    )
    assert process.stdin is not None
    try:
        yield process.stdin.write
    finally:
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.wait()
