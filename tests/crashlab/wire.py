"""The faults of `faults.py` as a client of a daemon meets them, alone and in pairs.

    python -m tests.crashlab.wire [--every N] [--json]

A client makes one change after the other, each under an operation id, while one call to the disk
fails; in a pair a second call fails when the client asks again. Each request gets one answer, an
error of the contract; `operation.get` and the session then are what that answer says; when the disk
is well the same daemon serves, without a restart, and ends with every change made once.
"""

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from tests.crashlab.faults import FAULTS, Fault
from tests.crashlab.shim import Kind, Shim, build, preloaded

from recapd.daemon.config import resolve
from recapd.daemon.lifecycle import serve
from recapd.protocol import messages as m
from recapd.protocol.client import Client, Patience, connect
from recapd.protocol.errors import NotFound, RpcError

TRIES: Final = 6
WAIT_S: Final = 60.0
ERRORS: Final = {
    "storage_error": True,
    "storage_full": True,
    "storage_readonly": None,
    "outcome_unknown": True,
    "compaction_failed": None,
    "archive_missing": False,
    "archive_corrupt": False,
}
"""What may be answered, and whether it must be `retryable` (None: either)."""

ITEM: Final = msgspec.Raw(b'{"role":"user","content":"%b"}' % (b"word " * 50))

STORY: Final[list[tuple[str, dict[str, Any], int, int]]] = [
    # method, parameters, and revision and entries behind it (-1: what it gives)
    ("session.create", {"session_id": "a", "items": [ITEM] * 5}, 1, 5),
    ("session.append", {"session_id": "a", "items": [ITEM]}, 2, 6),
    ("session.compact", {"session_id": "a", "force": True}, 3, 1),
    ("session.append", {"session_id": "a", "items": [ITEM] * 2}, 4, 3),
    ("session.restore", {"session_id": "a", "revision": 2}, 5, 6),
    ("session.rewind", {"session_id": "a", "after_entry_id": 2}, 6, 2),
    ("session.update", {"session_id": "a", "title": "t"}, 6, 2),
]


class Untrue(Exception):
    """An answer and what is there do not agree."""


class Teller:
    """Tells the story with one fault, or with two."""

    def __init__(self, shim: Shim, fault: Fault, second: int | None) -> None:
        self.errors: list[str] = []
        self._shim = shim
        self._fault = fault
        self._second = second

    async def tell(self, client: Client) -> None:
        at = (-1, 0)  # revision and entries; there is no session yet
        for number, (method, params, revision, entries) in enumerate(STORY):
            operation_id = f"op-{number}"
            await self._make(client, method, params | {"operation_id": operation_id}, at)
            at = (revision, entries)
            if await self._look(client) != at:
                raise Untrue(f"{method} was made, and {await self._look(client)} is there")
        self._shim.disarm()
        result = await client.request("session.verify", m.VerifyParams())
        if result.faults_total:
            raise Untrue(f"verify: {result.faults}")
        events = await client.request("session.events", m.EventsParams(session_id="a", since=0))
        seqs = [msgspec.json.decode(event)["seq"] for event in events.events]
        if seqs != [*range(1, len(seqs) + 1)]:
            raise Untrue(f"events {seqs}")

    async def _make(
        self, client: Client, method: str, params: dict[str, Any], before: tuple[int, int]
    ) -> None:
        for _ in range(TRIES):
            try:
                await client.call(method, params)
                return
            except RpcError as error:
                self._judge(error)
                retry = await self._truth(client, error, params, before)
                if not retry:
                    params = params | {"operation_id": f"{params['operation_id']}.again"}
        raise Untrue(f"{method} was never made, although the disk is well")

    def _judge(self, error: RpcError) -> None:
        """Is it an error that a client can use? Then the disk is well, or fails once more."""
        if not self._shim.fired:
            raise Untrue(f"{error.reason} without a fault") from error
        must = ERRORS.get(error.reason, False)
        if error.reason not in ERRORS or (must is not None and error.retryable is not must):
            raise Untrue(f"{error.reason}, retryable: {error.retryable}") from error
        self.errors.append(error.reason)
        self._shim.disarm()
        if self._second is not None:
            kinds = Kind.SYNC | Kind.WRITE | Kind.OPEN
            self._shim.arm(kinds, nth=self._second, action=self._fault.action, value=5)
            self._second = None

    async def _truth(
        self, client: Client, error: RpcError, params: dict[str, Any], before: tuple[int, int]
    ) -> bool:
        """Is it as the answer says? Whether the same operation may be asked for again."""
        status = await self._status(client, params["operation_id"])
        if status == "completed" and error.reason != "outcome_unknown":
            raise Untrue(f"{error.reason}, and it was made") from error
        if status != "completed" and await self._look(client) != before:
            raise Untrue(f"{error.reason}, and something was made") from error
        return status != "failed"  # which is its outcome for ever

    async def _status(self, client: Client, operation_id: str) -> str:
        for _ in range(TRIES):
            try:
                asked = m.OperationGetParams(operation_id=operation_id, wait_ms=60_000)
                status = (await client.request("operation.get", asked)).operation.status
                if status != "running":
                    return status
            except NotFound:
                return "unknown"
            except RpcError as error:
                self._judge(error)
        raise Untrue("it cannot be read how the operation ended, although the disk is well")

    async def _look(self, client: Client) -> tuple[int, int]:
        for _ in range(TRIES):
            try:
                session = (
                    await client.request("session.get", m.GetParams(session_id="a", view="info"))
                ).session
                return session.revision, session.entries
            except NotFound:
                return -1, 0
            except RpcError as error:
                self._judge(error)
        raise Untrue("the session cannot be read, although the disk is well")


async def _run(folder: Path, name: str, nth: int, second: int | None) -> list[str]:
    shim = Shim()
    fault = FAULTS[name]
    settings = resolve({"data_dir": folder / "data", "socket": folder / "s"}, {})
    shim.watch(folder / "data", fault.only)
    shim.disarm()
    ready = anyio.Event()
    teller = Teller(shim, fault, second)
    async with anyio.create_task_group() as tasks:

        async def daemon() -> None:
            code = await serve(settings, ready=ready.set)
            if code != 0:
                raise Untrue(f"it ended with {code}")

        tasks.start_soon(daemon)
        with anyio.fail_after(WAIT_S):
            await ready.wait()
            async with connect(
                settings.socket, reconnect=False, patience=Patience(total_s=0)
            ) as client:
                shim.arm(fault.kinds, nth=nth, action=fault.action, value=fault.value)
                await teller.tell(client)
                await client.request("server.shutdown", m.ShutdownParams(mode="now"))
    return teller.errors


def _try(name: str, nth: int, second: int | None) -> tuple[list[str], str]:
    folder = Path(tempfile.mkdtemp(prefix="recapd-"))
    try:
        return anyio.run(_run, folder, name, nth, second), ""
    except BaseException as error:  # an ExceptionGroup, mostly
        told = "".join(traceback.format_exception(error))
        return [], f"{name}, call {nth}, then {second}: {told}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """See the module; 1 when an answer was untrue."""
    parser = argparse.ArgumentParser(prog="tests.crashlab.wire")
    parser.add_argument("--every", type=int, default=1, help="let each n-th call fail")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "LD_PRELOAD" not in os.environ:
        with tempfile.TemporaryDirectory(prefix="recapd-") as folder:
            command = [sys.executable, "-m", "tests.crashlab.wire", *sys.argv[1:]]
            environment = preloaded(build(Path(folder)))
            return subprocess.run(command, env=environment, check=False).returncode
    logging.disable(logging.CRITICAL)
    rows: dict[str, Any] = {}
    for name in FAULTS:
        told: Counter[str] = Counter()
        untrue: list[str] = []
        cases = idle = 0
        while idle < 3:  # then the story makes no more such calls
            nth = 1 + cases * options.every
            errors, wrong = _try(name, nth, None if cases % 2 else 1 + nth % 3)
            told.update(errors)
            untrue += [wrong] if wrong else []
            cases += 1
            idle = 0 if errors or wrong else idle + 1
        rows[name] = {"cases": cases, "errors": told, "untrue": untrue}
    if options.json:
        print(json.dumps({"wire": rows}))
    else:
        for name, row in rows.items():
            counts = ", ".join(f"{n} {reason}" for reason, n in sorted(row["errors"].items()))
            print(f"{name:30}{row['cases']:6}  {counts}")
            print(*row["untrue"][:2], sep="\n")
    return int(any(row["untrue"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
