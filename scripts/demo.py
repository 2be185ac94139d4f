"""Shows the main job of recapd on a realistic history, and checks every claim that it prints.

A real daemon serves a temporary store over a real socket; nothing else is needed, and nothing is
left behind. `demo.py FILE` takes another history: one Responses item a line. Exits with 1 when
anything was not as it should be.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import msgspec

from recapd.protocol import messages as m
from recapd.protocol.client import Client, connect
from recapd.protocol.items import item_facts
from recapd.storage.archive import archive_path

HISTORY = Path(__file__).with_name("demo_history.jsonl")
WAIT_S = 30.0


class Checks:
    """What was verified, and what was not."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: list[str] = []

    def check(self, claim: str, holds: bool) -> None:
        (self.passed if holds else self.failed).append(claim)


def amount(tokens: m.Tokens) -> str:
    return f"{'' if tokens.exact else 'about '}{tokens.count:,} tokens ({tokens.method})"


def outline(entry: m.Entry) -> str:
    """One line about an entry."""
    item = bytes(entry.item)
    facts = item_facts(item)
    decoded = msgspec.json.decode(item)
    name = decoded.get("role") or facts.type
    mark = " (made by recapd)" if entry.reminder else ""
    content = decoded.get("content", "")
    text = content if isinstance(content, str) else content[0].get("text", "")
    return f"  {entry.id:>4}  {name:<10} {' '.join(text.split())[:64]!r}{mark}"


async def show(client: Client, data_dir: Path, original: list[bytes], checks: Checks) -> None:
    created = await client.request("session.create", m.CreateParams(title="A day at brotkorb"))
    session_id = created.session_id
    print(f"created session {session_id}")
    async with client.subscribe(session_id) as events:
        async for appended in client.append_items(session_id, original):
            session = appended.session
            print(f"appended {session.entries} items, {amount(session.tokens)}")
        result = await client.request("session.compact", m.CompactParams(session_id=session_id))
        before, after = required(result.tokens_before), required(result.tokens_after)
        print(f"compacted: {result.entries_before} entries, {amount(before)}")
        print(f"       to: {result.entries_after} entries, {amount(after)}")
        replaced: m.HistoryReplaced | None = None
        with anyio.fail_after(WAIT_S):
            async for notice in events:
                if notice.method == "history.replaced":
                    replaced = msgspec.json.decode(notice.params, type=m.HistoryReplaced)
                if notice.method == "compaction.finished":
                    break
    assert replaced is not None
    print(
        f"told: history.replaced, generation {replaced.from_generation} to"
        f" {replaced.to_generation}, seq {replaced.seq}"
    )
    revision = replaced.archived_revision

    print("\nthe new history:")
    history = [entry async for entry in client.pages(session_id)]
    for entry in history:
        print(outline(entry))
    present = [bytes(entry.item) for entry in history]
    instructions = [item for item in original if item_facts(item).role.value == "instruction"]
    checks.check(
        f"all {len(instructions)} instructions are kept word for word, first and in order",
        present[: len(instructions)] == instructions,
    )
    reminders = [item for item in original if item_facts(item).role.value == "reminder"]
    checks.check(
        f"the newest 10 of {len(reminders)} earlier reminders are kept",
        present[len(instructions) : -1] == reminders[-10:],
    )
    checks.check(
        "one new reminder with the summary stands behind them",
        history[-1].id == replaced.reminder_entry_id and history[-1].reminder is not None,
    )

    archived = [bytes(e.item) async for e in client.pages(session_id, revision=revision)]
    checks.check(
        f"session.get serves the {len(original)} original items of revision {revision},"
        " byte for byte",
        archived == original,
    )
    export = client.export(session_id, revision=revision, redact="none")
    text = "".join([chunk async for chunk in export])
    checks.check(
        "session.export gives back the very file that was put in, byte for byte",
        text.encode() == b"".join(item + b"\n" for item in original),
    )
    revisions = await client.request("session.revisions", m.SessionParams(session_id=session_id))
    archive = archive_path(data_dir / "archives", session_id, revision)
    printed = sha256sum(archive)
    print(f"\narchive: {archive.stat().st_size:,} bytes, sha256 {printed}")
    checks.check(
        "sha256sum of the archive file is what session.revisions says",
        revisions.revisions[0].sha256 == printed,
    )
    checks.check(
        "exactly one generation was made, and the notification names its archive",
        (replaced.to_generation, revisions.revisions[0].revision) == (1, revision),
    )


def required(tokens: m.Tokens | msgspec.UnsetType) -> m.Tokens:
    assert not isinstance(tokens, msgspec.UnsetType)
    return tokens


def sha256sum(path: Path) -> str:
    """By the program of that name where there is one, for this is what a user would type."""
    try:
        done = subprocess.run(["sha256sum", path], capture_output=True, check=True)
        return done.stdout.decode().split()[0]
    except FileNotFoundError:
        return hashlib.sha256(path.read_bytes()).hexdigest()


async def talk(path: Path, data_dir: Path, original: list[bytes], checks: Checks) -> None:
    async with connect(path, wait_s=WAIT_S) as client:
        await show(client, data_dir, original, checks)
        await client.request("server.shutdown", m.ShutdownParams())


def run(history: Path) -> int:
    original = history.read_bytes().splitlines()
    print(f"history: {len(original)} items, {sum(map(len, original)):,} bytes")
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="recapd-") as folder:
        data_dir, path = Path(folder) / "data", Path(folder) / "rpc.sock"
        command = [sys.executable, "-m", "recapd.daemon", "serve", "--log-level", "warning"]
        daemon = subprocess.Popen(
            [*command, "--data-dir", data_dir, "--socket", path],
            env={**os.environ, "RECAPD_HOME": folder},
        )
        try:
            anyio.run(talk, path, data_dir, original, checks)
            code = daemon.wait(WAIT_S)
            checks.check("the daemon stopped by itself, with exit code 0", code == 0)
            checks.check("its socket is gone", not path.exists())
        finally:
            daemon.kill()
            daemon.wait()
    print("\nverified:")
    for claim in checks.passed:
        print(f"  + {claim}")
    for claim in checks.failed:
        print(f"  - NOT: {claim}")
    print("\nall of it holds" if not checks.failed else "\nnot all of it holds")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]) if len(sys.argv) > 1 else HISTORY))
