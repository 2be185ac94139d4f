"""The daemons that `scripts/bench` drives, recapd and the floor, and the thin client for both.

They are sent the same requests, encoded beforehand, so that what is timed is the daemon. Needs
Linux: memory is read from /proc.
"""

import itertools
import json
import os
import random
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, Final, Literal

Name = Literal["recapd", "profiled", "floor"]
"""`profiled` is recapd under pyinstrument, which leaves its page beside the data when it ends."""

ROOT: Final = Path(__file__).resolve().parent.parent
START_S: Final = 30
STOP_S: Final = 30
ANSWER_S: Final = 300
WORDS: Final = (
    "retry parser lease commit offset branch header cursor replay shard flush schema merge budget "
    "probe index window socket quota digest timer reader"
).split()

RECAPD: Final = (
    *("--in-flight-max", "1024"),  # 100 sessions at once over one connection
    *("--frame-bytes-max", str(256 << 20)),  # a history in one answer, as the floor gives it
    *("--log-level", "error"),
)


def item(number: int, characters: int = 400) -> dict[str, Any]:
    """A message; the same for the same number."""
    user = number % 2 == 0
    words = random.Random(number).choices(WORDS, k=characters // 4)
    text = f"{number}: {' '.join(words)}"[:characters]
    kind = "input_text" if user else "output_text"
    role = "user" if user else "assistant"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


MADE: Final = [item(number) for number in range(1000)]


def items(count: int) -> list[dict[str, Any]]:
    return list(itertools.islice(itertools.cycle(MADE), count))


class Wire:
    """A connection: blocking, a line is a frame, notifications are skipped."""

    def __init__(self, path: Path) -> None:
        self._numbers = itertools.count(1)
        self.socket = socket.socket(socket.AF_UNIX)
        patience = struct.pack("ll", ANSWER_S, 0)  # settimeout would cost a call to the kernel
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
        give_up_s = time.monotonic() + START_S
        while self.socket.connect_ex(str(path)):
            if time.monotonic() > give_up_s:
                raise TimeoutError("the daemon does not listen")
            time.sleep(0.001)
        self._file = self.socket.makefile("rb", 1 << 20)

    def encode(self, method: str, params: object) -> bytes:
        request = {"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": params}
        return json.dumps(request, separators=(",", ":")).encode() + b"\n"

    def answer(self) -> bytes:
        """The next answer, unread."""
        while True:
            frame = self._file.readline()
            if not frame:
                raise EOFError("the daemon closed the connection")
            if not frame.startswith(b'{"jsonrpc":"2.0","method"'):
                return frame

    def ask(self, request: bytes) -> bytes:
        self.socket.sendall(request)
        return self.answer()

    def call(self, method: str, **params: object) -> Any:
        """The result; raises RuntimeError where the answer is an error."""
        return result(self.ask(self.encode(method, params)))

    def timed_us(self, method: str, **params: object) -> float:
        request = self.encode(method, params)
        start = time.perf_counter_ns()
        frame = self.ask(request)
        took = (time.perf_counter_ns() - start) / 1000
        if b'"error":' in frame[:60]:
            raise RuntimeError("the daemon refused what is measured")
        return took

    def flood(self, requests: Sequence[bytes]) -> list[bytes]:
        """All sent at once, whether or not answers are read meanwhile; all answers."""
        sender = Thread(target=self.socket.sendall, args=(b"".join(requests),))
        sender.start()
        answers = [self.answer() for _ in requests]
        sender.join()
        return answers

    def windowed_per_s(self, requests: Sequence[bytes], window: int) -> float:
        """Answers in a second, with `window` requests under way."""
        start = time.perf_counter()
        sent = min(window, len(requests))
        self.socket.sendall(b"".join(requests[:sent]))
        missing, rest = len(requests), b""
        while missing:
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError("the daemon closed the connection")
            if b'"error"' in data:
                raise RuntimeError("the daemon refused what is measured")
            done = data.count(b"\n")
            rest = data
            missing -= done
            self.socket.sendall(b"".join(requests[sent : sent + done]))
            sent += done
        if not rest.endswith(b"\n"):
            raise RuntimeError("more answers than requests")
        return len(requests) / (time.perf_counter() - start)

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def result(frame: bytes) -> Any:
    answer = json.loads(frame)
    if "error" in answer:
        raise RuntimeError(f"the daemon answered with error {answer['error']['code']}")
    return answer["result"]


@dataclass(frozen=True, slots=True)
class Target:
    """A running daemon, with a connection to it."""

    name: Name
    process: int
    socket: Path
    data: Path
    wire: Wire

    def create(self) -> str:
        """The id of a new session."""
        return str(self.wire.call("session.create")["session_id"])

    def fill(self, session: str, count: int, *, of: list[dict[str, Any]] | None = None) -> None:
        """Append `count` items, as many in a call as is allowed."""
        values = itertools.islice(itertools.cycle(of or MADE), count)
        while batch := list(itertools.islice(values, 1000)):
            self.wire.call("session.append", session_id=session, items=batch)

    def get(self, session: str) -> bytes:
        """The request for a whole history."""
        params: dict[str, object] = {"session_id": session}
        if self.name != "floor":
            params |= {"limit": 100_000, "max_bytes": 250 << 20}
        return self.wire.encode("session.get", params)

    def memory_mib(self, figure: Literal["VmRSS", "VmHWM"] = "VmRSS") -> float:
        status = Path(f"/proc/{self.process}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(figure))
        return int(line.split()[1]) / 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process}/clear_refs").write_text("5")


def arguments(name: Name, home: Path) -> list[str]:
    """How to start it on `home`."""
    places = home / "socket", home / "data"
    if name == "floor":
        return [sys.executable, "-m", "scripts.floor", *map(str, places)]
    serve = ("--socket", str(places[0]), "--data-dir", str(places[1]))
    page = ("pyinstrument", "-i", "0.005", "-r", "html", "-o", str(home / "profile.html"), "-m")
    under = page if name == "profiled" else ()
    return [sys.executable, "-m", *under, "recapd.daemon", "serve", *serve, *RECAPD]


@contextmanager
def running(name: Name, home: Path, prefix: Sequence[str] = ()) -> Generator[Target]:
    """A daemon on `home`, started by `prefix` where that is not empty; stopped at the end."""
    process = subprocess.Popen([*prefix, *arguments(name, home)], cwd=ROOT, env=_environment())
    try:
        wire = Wire(home / "socket")
        yield Target(name, process.pid, home / "socket", home / "data", wire)
        wire.close()
    finally:
        stop(process)
        (home / "socket").unlink(missing_ok=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it and what it runs (strace ends with the program it looks at)."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for number in [*map(int, children), process.pid]:
        os.kill(number, 15)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def _environment() -> dict[str, str]:
    """Without the settings of whoever measures; Python's might forbid it to keep bytecode, and then
    every start would compile everything, which no installed program does.
    """
    ours = ("RECAPD_", "PYTHON")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
