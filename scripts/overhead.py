"""What a compaction costs beside the time that a model takes to answer.

    scripts/bench overhead [--json] [--items N]

A daemon of its own compacts histories made of `demo_history.jsonl`, offline and with a model that
answers at once (`tests/provider_stub.py`, a process): `whole` is what a client waits. Then the
parts are done one after the other in this process, on a store of its own, to show how the whole is
divided:

read      the entries from the database
divide    what is kept and what is summarised
render    the body as text, for a model only
count     its tokens, for a model only, so that no request is too long
request   to the model and back, as the operation recorded it
evidence  beside the summary, and the check of the size
archive   written, synced, read back; the daemon does it beside everything before it
commit    the transaction

All in milliseconds: the median of the rounds, and the least and the greatest of the whole.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio

from recapd.daemon.compaction import pipeline
from recapd.daemon.compaction.summarise.given import given_summary
from recapd.daemon.compaction.tokens import SHARED_TABLE, count_tokens, estimate_tokens
from recapd.daemon.compaction.transcript import render
from recapd.daemon.histories import read_pages
from recapd.daemon.redaction import Redactor
from recapd.protocol import messages as m
from recapd.protocol.client import Client, connect
from recapd.protocol.items import item_facts
from recapd.storage.entry import Reminder, decode_entry, encode_entry
from recapd.storage.sqlite import open_store
from recapd.storage.store import (
    History,
    NewItem,
    NewSession,
    Receipt,
    Replacement,
    Session,
    Tokens,
)

ROOT: Final = Path(__file__).resolve().parent.parent
SIZES: Final = [200, 10_000]  # items
ROUNDS: Final = 5
WAIT_S: Final = 30.0

Times = dict[str, list[float]]  # milliseconds of each round


@contextmanager
def timed(times: Times, part: str) -> Generator[None]:
    start_s = time.perf_counter()
    yield
    times.setdefault(part, []).append(1000 * (time.perf_counter() - start_s))


@contextmanager
def provider() -> Generator[str]:
    """The base URL of a model that answers at once."""
    stub = subprocess.Popen(
        [sys.executable, "-m", "tests.provider_stub"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert stub.stdin is not None
    assert stub.stdout is not None
    yield f"http://127.0.0.1:{int(stub.stdout.readline())}/answer/v1"
    stub.stdin.close()  # it ends by that
    stub.wait(WAIT_S)


@contextmanager
def daemon(home: Path, base_url: str) -> Generator[Path]:
    """The socket of a daemon that may ask the model."""
    table = (
        f'[summarizers.chat]\nmodel = "m"\nbase_url = "{base_url}"\nwindow_tokens = 10_000_000\n'
    )
    (home / "recapd.toml").write_text(table)
    ready, writing = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "recapd.daemon", "serve"),
            *("--log-level", "error", "--ready-fd", str(writing)),
        ],
        env={**os.environ, "RECAPD_HOME": str(home)},
        pass_fds=[writing],
    )
    os.close(writing)
    with open(ready, "rb") as told:
        assert told.read() == b"ready\n"
    yield home / "rpc.sock"
    process.terminate()
    process.wait(WAIT_S)


async def measure_whole(
    client: Client, items: list[bytes], kind: m.Summarizer, times: Times
) -> None:
    created = await client.request("session.create", m.CreateParams())
    async for _ in client.append_items(created.session_id, items):
        pass
    with timed(times, "whole"):
        result = await client.request(
            "session.compact", m.CompactParams(session_id=created.session_id, summarizer=kind)
        )
    attempts = result.attempt_log or []
    assert len(attempts) == (kind != "offline")
    times.setdefault("request", []).append(sum(attempt.duration_ms for attempt in attempts))
    await client.request("session.delete", m.DeleteParams(session_id=created.session_id))


async def measure_parts(folder: Path, items: list[bytes], times: Times) -> None:
    async with open_store(folder) as store:
        new = [NewItem(item, estimate_tokens(item), item_facts(item).calls) for item in items]
        await store.create(NewSession("s")).wait()
        await store.append("s", new).wait()
        session = await store.begin("s", Receipt("o", "session.compact", b"")).wait()
        assert isinstance(session, Session)
        with timed(times, "read"):
            pages = read_pages(store, "s", generation=0, entries=session.entries)
            history = [decode_entry(line) async for lines in pages for line in lines]
        with timed(times, "divide"):
            parts = await pipeline.divide(history)
        with timed(times, "render"):
            redactor = Redactor(each_once=True)
            texts = [redactor.text(render(entry.item)) for entry in parts.body]
        with timed(times, "count"):
            for text in texts:
                count_tokens(text)
        with timed(times, "evidence"):
            summarise = given_summary("A summary.")
            plan = await pipeline.prepare(parts, summarise=summarise, redact=redactor.text)
        with timed(times, "archive"):
            archive = await store.archive(session, "compaction", "o")
        entries = plan.build(session.next_entry_id, 0, Reminder(1, "o", session.revision))
        lines = [encode_entry(entry) for entry in entries]
        made = History(lines, [], session.next_entry_id + 1, Tokens(plan.tokens_after.count, 0))
        with timed(times, "commit"):
            change = Replacement("o", archive, made, {"retained_entry_ids": []})
            await store.replace("s", change, render=lambda _: b"{}").wait()


def medians(times: Times) -> dict[str, float]:
    return {part: round(statistics.median(values), 1) for part, values in times.items()}


async def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="scripts/bench overhead")
    parser.add_argument("--json", action="store_true", help="print the medians as JSON")
    parser.add_argument("--items", type=int, action="append", help="how many, for 200 and 10000")
    options = parser.parse_args()
    demo = (ROOT / "scripts/demo_history.jsonl").read_bytes().splitlines()
    SHARED_TABLE.encoding()  # loading it is no part of any compaction but the first
    report: dict[str, dict[str, dict[str, float]]] = {}
    say: Callable[[str], None] = (lambda line: None) if options.json else print
    say(f"{'':18}{'items':>8}  milliseconds, median of {ROUNDS}")
    with tempfile.TemporaryDirectory(prefix="recapd-") as temporary, provider() as base_url:
        home = Path(temporary)
        for size in options.items or SIZES:
            items = [demo[number % len(demo)] for number in range(size)]
            report[str(size)] = {}
            with daemon(home, base_url) as socket:
                async with connect(socket) as client:
                    for kind in ("offline", "chat"):
                        times: Times = {}
                        for _ in range(ROUNDS + 1):
                            await measure_whole(client, items, kind, times)
                        times = {part: values[1:] for part, values in times.items()}
                        report[str(size)][kind] = medians(times)
                        whole = times["whole"]
                        say(
                            f"{kind + ', whole':18}{size:>8}  {statistics.median(whole):.1f}"
                            f" ({min(whole):.1f} to {max(whole):.1f}),"
                            f" request {statistics.median(times['request']):.1f}"
                        )
            parts: Times = {}
            for number in range(ROUNDS):
                await measure_parts(home / f"parts-{size}-{number}", items, parts)
            report[str(size)]["parts"] = medians(parts)
            say(
                f"{'parts':18}{size:>8}  "
                + ", ".join(f"{part} {value}" for part, value in medians(parts).items())
            )
    if options.json:
        print(json.dumps({"overhead_ms": report}))


if __name__ == "__main__":
    anyio.run(main)
