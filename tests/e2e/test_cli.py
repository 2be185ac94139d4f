"""The command line against the real daemon, as its users meet it (`daemon/cli.py`)."""

import json
import os
import pty
import re
import select
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import pytest

from recapd.daemon.cli import ExitCode
from recapd.daemon.config import Settings, settings_fields
from recapd.daemon.lifecycle import ExitCode as ServeExitCode

PROGRAM: Final = (sys.executable, "-P", "-m", "recapd.daemon")

WAIT_S: Final = 30
"""For anything that should happen at once; the machine may have other things to do."""

ITEMS: Final = (
    b'{"type":"message", "role":"developer","content":"rules",  "n":1.0}',
    b'{"role":"user","content":"caf\\u00e9 \xe2\x80\xa8 \xf0\x9f\x98\x80"}',
    b'{"type":"function_call","call_id":"c1","name":"f","arguments":"{}","big":123456789012345678901}',
)


class Home:
    """A folder with a store of its own. Whatever daemon runs there is ended by the fixture."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RECAPD_", "XDG_")) and name not in ("NO_COLOR", "PAGER")
        } | {"RECAPD_HOME": str(path)}

    def run(
        self, *arguments: str, stdin: bytes = b"", **environment: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*PROGRAM, *arguments],
            input=stdin,
            capture_output=True,
            env=self.environment | environment,
            timeout=WAIT_S,
            check=False,
        )

    def ok(self, *arguments: str, stdin: bytes = b"", **environment: str) -> bytes:
        """What a command that has to succeed says on stdout."""
        ended = self.run(*arguments, stdin=stdin, **environment)
        assert (ended.returncode, ended.stderr) == (0, b"")
        return ended.stdout

    def json(self, *arguments: str, stdin: bytes = b"") -> Any:
        """The one document on stdout with `--json`."""
        return json.loads(self.ok(*arguments, "--json", stdin=stdin))

    def fails(self, code: int, *arguments: str, stdin: bytes = b"", **environment: str) -> str:
        """What a command that has to fail with this code says on stderr."""
        ended = self.run(*arguments, stdin=stdin, **environment)
        assert (ended.returncode, ended.stdout) == (code, b"")
        said = ended.stderr.decode()
        assert str(self.path) not in said
        assert "Traceback" not in said
        return said

    @contextmanager
    def running(
        self,
        *arguments: str,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> Generator[subprocess.Popen[bytes]]:
        """A command while it runs."""
        process = subprocess.Popen(
            [*PROGRAM, *arguments],
            bufsize=0,  # what select does not see has not been read either
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            pass_fds=pass_fds,
        )
        try:
            with process:
                try:
                    yield process
                finally:
                    process.kill()
        finally:
            process.wait(WAIT_S)

    def pid(self) -> int:
        number: int = self.json("status")["info"]["server"]["pid"]
        return number

    def session(self, *items: bytes) -> str:
        """The id of a new session with these items."""
        session_id = self.ok("new").decode().strip()
        if items:
            self.ok("append", session_id, stdin=b"\n".join(items))
        return session_id


@contextmanager
def new_home() -> Generator[Home]:
    # Not tmp_path: a socket's path has 107 bytes at most.
    path = Path(tempfile.mkdtemp(prefix="recapd-"))
    home = Home(path)
    try:
        yield home
    finally:
        stopped = home.run("stop", "--now")
        if stopped.returncode != 0:
            kill_listener(path / "rpc.sock")
        shutil.rmtree(path)
        assert stopped.returncode == 0


def kill_listener(path: Path) -> None:
    """End the process that listens at a socket, whatever state it is in (unix(7), SO_PEERCRED)."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    os.kill(struct.unpack("3i", credentials)[0], signal.SIGKILL)


@pytest.fixture
def home() -> Iterator[Home]:
    with new_home() as home:
        yield home


@pytest.fixture(scope="module")
def shared() -> Iterator[Home]:
    """A home with a running daemon, for what needs no store of its own."""
    with new_home() as home:
        home.ok("start")
        yield home


def line_of(process: subprocess.Popen[bytes]) -> bytes:
    """The next line that it writes."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], WAIT_S)[0]
    return process.stdout.readline()


def has_ended(pid: int) -> bool:
    """Whether the process is gone, or only waits for its end to be noticed by its parent."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def ends(process: subprocess.Popen[bytes]) -> int:
    return process.wait(WAIT_S)


# Starting and stopping.


def test_the_first_command_starts_a_daemon_and_the_next_ones_use_it(home: Home) -> None:
    assert home.fails(3, "status") != ""
    home.ok("list")
    pid = home.pid()
    home.ok("new")
    assert home.pid() == pid
    assert b"runs already" in home.ok("start")
    assert home.json("start")["server"]["pid"] == pid


def test_a_daemon_in_the_background_leaves_its_starter_alone(home: Home) -> None:
    home.ok("start")
    pid = home.pid()
    assert os.getsid(pid) == pid != os.getsid(0)
    assert Path(f"/proc/{pid}/cwd").resolve() == home.path.resolve()
    descriptors = {Path(f"/proc/{pid}/fd/{number}").readlink().name for number in (0, 1, 2)}
    assert descriptors == {"null", "recapd.log"}


def test_only_their_owner_can_read_what_lies_in_the_home(home: Home) -> None:
    home.ok("new")
    for path in (home.path, *home.path.rglob("*")):
        assert stat.S_IMODE(path.lstat().st_mode) & 0o077 == 0, path.name
    assert stat.S_IMODE((home.path / "recapd.log").stat().st_mode) == 0o600


def test_stop_returns_when_the_process_has_ended(home: Home) -> None:
    home.ok("start")
    pid = home.pid()
    assert home.ok("stop") == b"recapd has stopped\n"
    assert has_ended(pid)
    assert not (home.path / "rpc.sock").exists()


def test_stopping_where_none_runs_is_no_fault(home: Home) -> None:
    ended = home.run("stop", "--json")
    assert (ended.returncode, json.loads(ended.stdout)) == (0, {"stopping": False})
    assert ended.stderr != b""
    assert home.run("--no-start", "list").returncode == 3


def test_what_was_stored_is_there_after_a_stop(home: Home) -> None:
    session_id = home.session(*ITEMS)
    home.ok("stop")
    exported = home.ok("export", session_id, "--no-redact")
    assert exported.splitlines(keepends=False)[0] == ITEMS[0]


def test_without_a_daemon_and_without_starting_one_the_code_is_3(home: Home) -> None:
    for arguments in (["list"], ["new"], ["export", "s"], ["watch"], ["call", "protocol.ping"]):
        assert "recapd start" in home.fails(3, "--no-start", *arguments)
    said = json.loads(home.fails(3, "list", "--no-start", "--json"))
    assert said["error"]["data"]["reason"] == "no_daemon"
    assert list(home.path.iterdir()) == []


def test_commands_at_the_same_moment_start_one_daemon(home: Home) -> None:
    with (
        home.running("call", "server.info") as first,
        home.running("call", "server.info") as second,
        home.running("call", "server.info") as third,
    ):
        said = [process.communicate(timeout=WAIT_S)[0] for process in (first, second, third)]
        assert {process.returncode for process in (first, second, third)} == {0}
    assert len({json.loads(one)["server"]["pid"] for one in said}) == 1


def test_a_second_daemon_leaves_with_4(home: Home) -> None:
    home.ok("start")
    assert home.fails(4, "serve") != ""


@pytest.mark.parametrize("arguments", [["serve"], ["start"], ["list"]])
def test_a_damaged_store_is_5_and_says_so(home: Home, arguments: list[str]) -> None:
    (home.path / "store.db").write_bytes(b"no database" * 1000)
    (home.path / "store.db").chmod(0o600)
    assert "damaged" in home.fails(5, *arguments)


@pytest.mark.parametrize("arguments", [["serve"], ["start"], ["list"]])
def test_a_folder_that_others_may_write_to_is_5_and_says_so(
    home: Home, arguments: list[str]
) -> None:
    home.path.chmod(0o777)
    assert "private" in home.fails(5, *arguments)
    home.path.chmod(0o700)


def test_serve_says_when_it_is_ready_and_drains_on_a_signal(home: Home) -> None:
    ready, writing = os.pipe()
    with home.running("serve", "--ready-fd", str(writing), pass_fds=[writing]) as process:
        os.close(writing)
        assert select.select([ready], [], [], WAIT_S)[0]
        with os.fdopen(ready, "rb") as told:
            assert told.read() == b"ready\n"
        assert home.pid() == process.pid
        process.send_signal(signal.SIGTERM)
        assert ends(process) == 0


def test_serve_does_not_mind_that_nobody_waits_for_it_any_more(home: Home) -> None:
    ready, writing = os.pipe()
    os.close(ready)
    with home.running("serve", "--ready-fd", str(writing), pass_fds=[writing]) as process:
        os.close(writing)
        assert process.stderr is not None
        assert b"ready" in process.stderr.readline()
        assert home.pid() == process.pid
        process.send_signal(signal.SIGTERM)
        assert ends(process) == 0


def test_the_exit_codes_of_serve_are_those_of_the_command_line() -> None:
    assert {(code.name, code.value) for code in ServeExitCode if code} <= {
        (code.name, code.value) for code in ExitCode
    }


# Options and settings.


def test_the_help_names_every_command_and_every_exit_code(shared: Home) -> None:
    said = shared.ok("--help").decode()
    for command in (
        "serve start stop status new list append show compact revisions restore rewind fork"
        " export watch delete update call token"
    ).split():
        assert re.search(rf"^  {command} +[A-Z]", said, re.MULTILINE)
        assert b"Usage: recapd" in shared.ok(command, "--help")
    for code in ExitCode:
        assert re.search(rf"^ +{code.value}  +\w", said, re.MULTILINE)
    assert re.fullmatch(rb"recapd [0-9.]+\n", shared.ok("--version"))


def test_every_setting_has_a_flag_that_names_its_variable(shared: Home) -> None:
    said = shared.ok("serve", "--help").decode()
    for field in settings_fields():
        assert f"--{field.name.replace('_', '-')}" in said
        assert f"[RECAPD_{field.name.upper()}]" in " ".join(said.split())
    assert len(settings_fields()) == len(Settings.__dataclass_fields__) - 1  # the summarizers


def test_a_setting_that_cannot_be_used_is_2(shared: Home) -> None:
    assert "in_flight_max" in shared.fails(2, "list", RECAPD_IN_FLIGHT_MAX="none")
    assert "in_flight_max" in shared.fails(2, "serve", "--in-flight-max", "0")
    assert "107" in shared.fails(2, "list", "--socket", "/tmp/" + "x" * 120)


def test_a_command_line_that_cannot_be_used_is_2(shared: Home) -> None:
    for arguments in (
        ["no-such-command"],
        ["append"],
        ["append", "s", "/no/such/file"],
        ["list", "--limit", "0"],
        ["new", "--label", "nothing"],
        ["export", "s", "--revision", "last"],
        ["export", "s", "--json", "--format", "jsonl"],
        ["watch", "--since", "5"],
        ["watch", "s", "--since", "yesterday"],
        ["call", "protocol.ping", "something"],
        ["call", "protocol.ping", "a:=not json"],
    ):
        assert shared.run(*arguments).returncode == 2, arguments


def test_shared_options_may_stand_before_and_behind_the_command(shared: Home) -> None:
    socket = str(shared.path / "rpc.sock")
    other = str(shared.path / "other.sock")
    for arguments in (
        ["--socket", socket, "--json", "list"],
        ["list", "--json", "--socket", socket],
    ):
        assert "sessions" in json.loads(shared.ok(*arguments))
    for arguments in (
        ["--socket", other, "--no-start", "list"],
        ["list", "--no-start", "--socket", other],
    ):
        shared.fails(3, *arguments)


# Sessions and their histories.


def test_a_new_session_is_listed_with_what_was_said_of_it(shared: Home) -> None:
    created = shared.ok(
        *["new", "--id", "s:1", "--title", "bell \a and\nline", "--cwd", "/somewhere"],
        *["--label", "a=1", "--label", "b=x=y"],
    )
    assert created == b"s:1\n"
    listed = shared.json("list", "--label", "a=1", "--cwd", "/somewhere", "--title", "BELL")
    assert [session["session_id"] for session in listed["sessions"]] == ["s:1"]
    assert listed["sessions"][0]["labels"] == {"a": "1", "b": "x=y"}
    shown = shared.ok("list", "--label", "a=1").decode()
    assert "s:1" in shown
    assert "bell \\x07 and line" in shown
    assert shared.json("new")["session"]["revision"] == 0
    assert "already_exists" in shared.fails(1, "new", "--id", "s:1")
    assert "invalid_params" in shared.fails(1, "new", "--id", "../x")


def test_a_session_can_be_compacted_unasked(shared: Home) -> None:
    """`new` and `update` set the line, `list` and `show` tell of it."""
    session_id = (
        shared.ok("new", "--auto-compact-at", "4000", "--label", "of=auto").decode().strip()
    )
    assert "0/4000" in shared.ok("list", "--label", "of=auto").decode().split()
    big = json.dumps({"role": "user", "content": "word " * 4000}).encode()
    appended = shared.json("append", session_id, stdin=big)
    assert appended["session"]["tokens"]["count"] > 4000
    events = f"session_id={session_id}", "since:=3", "wait_ms:=20000"
    while True:
        told = shared.json("call", "session.events", *events)["events"]
        if told[-1]["method"] == "compaction.finished":
            break
    assert told[-1]["status"] == "completed"
    shown = shared.ok("show", session_id).decode()
    assert "compacted automatically at 4000 tokens" in shown
    assert "archived revisions: 1" in shown


def test_what_is_stored_is_verified(home: Home) -> None:
    """PROMISES.md R7: the structure, every byte, or a share; 1 when something is wrong."""
    session_id = home.ok("new").decode().strip()
    home.ok("append", session_id, "-", stdin=b"\n".join(ITEMS))
    home.ok("compact", session_id)
    assert home.ok("verify") == b"2 histories checked, 0 B read\n"
    shares = [home.json("verify", "--subset", f"{part}/3")["bytes"] for part in (1, 2, 3)]
    assert sum(shares) == home.json("verify", session_id, "--read-data")["bytes"] > 0
    for wrong in ("0/3", "4/3", "1", "a/b"):
        assert "--subset" in home.fails(2, "verify", "--subset", wrong)
    (archive,) = home.path.rglob("*.zst")
    archive.write_bytes(archive.read_bytes()[:-1])
    ended = home.run("verify")
    assert (ended.returncode, ended.stderr) == (1, b"recapd: 1 fault\n")
    assert [line.split() for line in ended.stdout.splitlines()][1] == [
        *(session_id.encode(), b"1", b"archive_corrupt"),
    ]


def test_a_backup_is_made_beside_the_daemon_and_put_back_without_it(
    home: Home, tmp_path: Path
) -> None:
    """4: a daemon serves; 1: refused, and why; 5: the database is damaged; 0: all is there."""
    session_id = home.session(*ITEMS)
    home.ok("compact", session_id)
    target = str(tmp_path / "backup")
    assert home.ok("backup", target).startswith(b"sessions: 1, archives: 1, ")
    assert "not empty" in home.fails(1, "backup", target)
    assert home.json("backup", str(tmp_path / "other"))["sessions"] == 1
    shown = home.ok("show", session_id, "--full")
    home.ok("append", session_id, stdin=ITEMS[1])
    assert "A daemon serves" in home.fails(4, "restore-backup", target, "--replace")
    home.ok("stop")
    assert "has sessions" in home.fails(1, "restore-backup", target)
    assert "no whole backup" in home.fails(1, "restore-backup", str(home.path), "--replace")
    assert home.json("restore-backup", target, "--replace")["archives"] == 1
    assert home.ok("show", session_id, "--full") == shown
    assert home.ok("verify", "--read-data").startswith(b"2 histories checked")
    home.ok("stop")
    (archive,) = (tmp_path / "backup").rglob("*.zst")
    archive.unlink()
    said = home.fails(1, "restore-backup", target, "--replace")
    assert f"{session_id} 1 archive_missing" in said
    (home.path / "store.db").write_bytes(b"no database" * 1000)
    assert "damaged" in home.fails(5, "backup", str(tmp_path / "third"))
    assert not (tmp_path / "third").exists()


def test_an_update_changes_what_is_named(shared: Home) -> None:
    session_id = shared.ok("new", "--title", "a", "--cwd", "/x").decode().strip()
    arguments = "update", session_id
    assert shared.ok(*arguments, "--title", "b", "--auto-compact-at", "5000") == b""
    limits = "--auto-compact-at", "6000", "--keep-recent-tokens", "500"
    updated = shared.json(*arguments, *limits, "--cwd", "")["session"]
    assert (updated["title"], updated["cwd"], updated["state"]) == ("b", None, "active")
    assert updated["auto_compact"] == {
        **{"at_tokens": 6000, "keep_recent_tokens": 500},
        **{"instructions": None, "summarizer": None},
    }
    updated = shared.json(*arguments, "--auto-compact-at", "0", "--state", "archived")["session"]
    assert (updated["title"], updated["state"], updated["auto_compact"]) == ("b", "archived", None)
    assert "invalid_params" in shared.fails(1, *arguments, "--auto-compact-at", "10")
    assert "--auto-compact-at" in shared.fails(2, *arguments, "--keep-recent-tokens", "10")


def test_a_list_ends_at_its_limit_and_goes_on_with_its_cursor(shared: Home) -> None:
    for number in range(3):
        shared.ok("new", "--id", f"page-{number}", "--label", "of=pages")
    first = shared.json("list", "--label", "of=pages", "--limit", "2", "--sort", "session_id")
    assert len(first["sessions"]) == 2
    second = shared.json(
        *["list", "--label", "of=pages", "--limit", "2", "--sort", "session_id"],
        *["--cursor", first["next_cursor"]],
    )
    assert [one["session_id"] for one in second["sessions"]] == ["page-0"]
    assert second["next_cursor"] is None


@pytest.mark.parametrize(
    "text",
    [
        b"\n".join(ITEMS),
        b"\xef\xbb\xbf" + b"\r\n\r\n".join(ITEMS) + b"\r\n",
        b"[" + b",".join(ITEMS) + b"]",
        b"  [\n" + b" ,\n".join(ITEMS) + b"\n]\n",
    ],
    ids=["lines", "lines of another system", "array", "array in lines"],
)
def test_items_are_stored_as_the_bytes_that_they_are(shared: Home, text: bytes) -> None:
    session_id = shared.ok("new").decode().strip()
    appended = shared.json("append", session_id, stdin=text)
    assert appended["entry_ids"] == [1, 2, 3]
    assert appended["session"]["revision"] == 1
    exported = shared.ok("export", session_id, "--no-redact")
    assert exported == b"".join(item + b"\n" for item in ITEMS)
    shown = shared.ok("show", session_id, "--json")
    assert all(item in shown for item in ITEMS)
    document = json.loads(shown)
    assert document["session"]["session_id"] == session_id
    assert document["revision"] == 1
    assert [entry["id"] for entry in document["entries"]] == [1, 2, 3]


def test_one_item_may_stand_in_many_lines_of_a_file(shared: Home, tmp_path: Path) -> None:
    file = tmp_path / "item.json"
    file.write_bytes(b'{\n  "role": "user",\n  "content": "hi"\n}\n')
    session_id = shared.ok("new").decode().strip()
    assert shared.ok("append", session_id, str(file)) == b"1 item, entry 1 to 1, revision 1\n"
    exported = shared.ok("export", session_id, "--no-redact")
    assert exported == b'{   "role": "user",   "content": "hi" }\n'


def test_many_items_go_in_pieces_and_come_back_in_pages(shared: Home) -> None:
    items = [b'{"role":"user","content":"%d %b"}' % (number, b"x" * 500) for number in range(2500)]
    session_id = shared.ok("new").decode().strip()
    appended = shared.json("append", session_id, stdin=b"\n".join(items))
    assert appended["entry_ids"] == list(range(1, 2501))
    assert appended["session"]["revision"] == 3
    assert shared.ok("export", session_id) == b"".join(item + b"\n" for item in items)
    shown = json.loads(shared.ok("show", session_id, "--json"))
    assert [entry["id"] for entry in shown["entries"]] == list(range(1, 2501))
    assert len(shared.ok("show", session_id).splitlines()) == 2503


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "no items"),
        (b"[]", "no items"),
        (b"hello", "begin"),
        (b'{"a":', "not JSON"),
        (b'[{"a":1}, 3]', "Item 1"),
        (b'{"a":1}\n{"b":', "Line 2"),
        (b'{"a":1}\n\n[]\n', "Line 3"),
        (b'{"a":"\xff"}\n', "not valid JSON"),
        (b'[{"a":NaN}]', "not JSON"),
    ],
)
def test_what_is_no_item_is_refused_and_nothing_is_appended(
    shared: Home, text: bytes, said: str
) -> None:
    session_id = shared.ok("new").decode().strip()
    assert said in shared.fails(1, "append", session_id, stdin=text)
    assert shared.json("call", "session.get", f"session_id={session_id}")["revision"] == 0


def test_a_fault_behind_many_items_says_how_many_are_there(shared: Home) -> None:
    session_id = shared.ok("new").decode().strip()
    said = shared.fails(1, "append", session_id, stdin=b'{"n":1}\n' * 1500 + b"oops")
    assert "1000 items" in said
    assert "Line 1501" in said


def test_an_append_may_expect_a_revision(shared: Home) -> None:
    session_id = shared.session(ITEMS[0])
    said = shared.fails(1, "append", session_id, "--expected-revision", "0", stdin=ITEMS[1])
    assert "conflict" in said
    assert "revision=1" in said
    shared.ok("append", session_id, "--expected-revision", "1", stdin=ITEMS[1])


def test_a_history_is_shown_in_an_outline_or_in_full(shared: Home) -> None:
    long = b'{"role":"user","content":"first\\nsecond \\u001b[31m %b"}' % (b"y" * 200)
    session_id = shared.session(ITEMS[0], long)
    outline = shared.ok("show", session_id).decode().splitlines()
    assert outline[0].startswith(session_id)
    assert outline[3].split() == ["#1", "developer:", "rules"]
    assert outline[4].startswith("#2")
    assert "first second \\x1b[31m" in outline[4]
    assert outline[4].endswith("…")
    full = shared.ok("show", session_id, "--full").decode()
    assert "y" * 200 in full
    assert "\x1b" not in full
    assert "not_found" in shared.fails(1, "show", "no-such-session")


def test_a_compaction_archives_what_it_replaces(shared: Home) -> None:
    session_id = shared.session(*ITEMS)
    assert b"archived: 1" in shared.ok("compact", session_id, "--force")
    revisions = shared.json("revisions", session_id)["revisions"]
    assert [one["revision"] for one in revisions] == [1]
    assert revisions[0]["sha256"].encode() in shared.ok("revisions", session_id)
    archived = shared.ok("export", session_id, "--revision", "1", "--no-redact")
    assert archived == b"".join(item + b"\n" for item in ITEMS)
    assert b"archived revision 1" in shared.ok("show", session_id, "--revision", "1")
    every = shared.ok("export", session_id, "--revision", "all", "--no-redact")
    present = shared.ok("export", session_id, "--no-redact")
    assert every == archived + present
    assert ITEMS[0] in present
    assert "revision_not_found" in shared.fails(1, "show", session_id, "--revision", "9")


def test_a_restore_and_a_rewind_go_back_and_can_be_taken_back(shared: Home) -> None:
    session_id = shared.session(*ITEMS)
    shared.ok("compact", session_id, "--force")
    original = shared.ok("export", session_id, "--revision", "1", "--no-redact")
    said = shared.ok("restore", session_id, "1").decode()
    assert said == "revision 3, the one before is archived: 2\n3 entries, now 3\n"
    assert shared.ok("export", session_id, "--no-redact") == original
    assert b"has that history already" in shared.ok("rewind", session_id, "3")
    said = shared.ok("rewind", session_id, "1").decode()
    assert said == "revision 4, the one before is archived: 3\n3 entries, now 1\n"
    assert shared.ok("export", session_id, "--no-redact") == ITEMS[0] + b"\n"
    result = shared.json("restore", session_id, "3")
    assert (result["archived_revision"], result["entries_after"]) == (4, 3)
    kinds = [one["kind"] for one in shared.json("revisions", session_id)["revisions"]]
    assert kinds == ["restore", "rewind", "restore", "compaction"]
    assert "revision_not_found" in shared.fails(1, "restore", session_id, "9")
    said = shared.fails(1, "rewind", session_id, "9")
    assert "not_found" in said
    assert "what=entry" in said
    shared.fails(2, "rewind", session_id, "last")


def test_a_fork_is_a_session_of_its_own(shared: Home) -> None:
    session_id = shared.session(*ITEMS)
    shared.ok("compact", session_id, "--force")
    forked = shared.ok("fork", session_id).decode().strip()
    present = shared.ok("export", session_id, "--no-redact")
    assert shared.ok("export", forked, "--no-redact") == present
    arguments = ["--revision", "1", "--after", "2", "--id", f"{session_id}-2", "--title", "t"]
    told = shared.json("fork", session_id, *arguments)["session"]
    assert (told["session_id"], told["title"]) == (f"{session_id}-2", "t")
    assert told["parent"] == {"session_id": session_id, "revision": 1}
    shared.ok("delete", session_id, "--yes")
    assert shared.ok("export", told["session_id"], "--no-redact") == b"\n".join(ITEMS[:2]) + b"\n"
    assert "already_exists" in shared.fails(1, "fork", forked, "--id", told["session_id"])


def test_a_compaction_takes_a_summary_from_a_file_or_standard_input(
    shared: Home, tmp_path: Path
) -> None:
    file = tmp_path / "summary"
    file.write_text("We said hé.", encoding="utf-8")
    session_id = shared.session(*ITEMS[:2])  # without the call, behind which all would be kept
    result = shared.json("compact", session_id, "--force", "--summary", str(file))
    assert result["quality"] == "client"
    assert "We said hé." in shared.ok("show", session_id, "--full").decode()
    shared.ok("append", session_id, stdin=ITEMS[1])
    shared.ok("compact", session_id, "--summary", "-", stdin=b"And then more.")
    assert "And then more." in shared.ok("show", session_id, "--full").decode()


def test_a_compaction_need_not_be_waited_for(shared: Home) -> None:
    session_id = shared.session(*ITEMS)
    operation_id = shared.ok("compact", session_id, "--force", "--no-wait").decode().strip()
    ended = shared.json("call", "operation.get", f"operation_id={operation_id}", "wait_ms:=20000")
    assert ended["operation"]["status"] == "completed"


def test_nothing_to_compact_is_1_and_says_what_helps(shared: Home) -> None:
    session_id = shared.session(ITEMS[0])
    said = shared.fails(1, "compact", session_id)
    assert "nothing_to_compact" in said
    assert "force" in said


# Exports.


def test_an_export_replaces_secrets_unless_told_otherwise(shared: Home) -> None:
    secret = b"sk-proj-" + b"a1B2c3D4" * 5
    session_id = shared.session(b'{"role":"user","content":"%b"}' % secret)
    ended = shared.run("export", session_id)
    assert ended.returncode == 0
    assert secret not in ended.stdout
    assert b"openai_key 1" in ended.stderr
    assert secret in shared.ok("export", session_id, "--no-redact")


def test_an_export_into_a_file_is_private_and_whole(shared: Home, tmp_path: Path) -> None:
    session_id = shared.session(*ITEMS)
    file = tmp_path / "out.jsonl"
    file.write_text("what was there before")
    file.chmod(0o644)
    manifest = shared.json("export", session_id, "--no-redact", "-o", str(file))
    assert manifest["bytes"] == file.stat().st_size
    assert file.read_bytes() == b"".join(item + b"\n" for item in ITEMS)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_export_that_fails_leaves_the_file_as_it_was(shared: Home, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    file.write_text("what was there before")
    assert "not_found" in shared.fails(1, "export", "no-such-session", "-o", str(file))
    assert file.read_text() == "what was there before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_export_follows_no_link_and_replaces_nothing_but_files(
    shared: Home, tmp_path: Path
) -> None:
    session_id = shared.session(*ITEMS)
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("precious")
    link.symlink_to(target)
    os.mkfifo(pipe)
    for path in (link, pipe):
        assert "no file" in shared.fails(1, "export", session_id, "-o", str(path))
    assert target.read_text() == "precious"


def test_an_export_has_three_forms(shared: Home) -> None:
    session_id = shared.session(*ITEMS)
    document = json.loads(shared.ok("export", session_id, "--format", "json"))
    assert document == shared.json("export", session_id)
    assert shared.ok("export", session_id, "--format", "markdown").startswith(b"# ")


# Watching.


def test_events_are_watched_across_a_restart_each_once(home: Home) -> None:
    home.ok("new", "--id", "a")
    with home.running("watch", "--since", "start", "--json") as watching:
        assert seen(watching) == ("session.created", "a", 1)
        home.ok("append", "a", stdin=ITEMS[0])
        assert seen(watching) == ("history.appended", "a", 2)
        home.ok("stop")
        assert seen(watching)[0] == "server.draining"
        home.ok("append", "a", stdin=ITEMS[0])
        home.ok("new", "--id", "b")
        assert seen(watching) == ("history.appended", "a", 3)
        assert seen(watching) == ("session.created", "b", 1)
        watching.send_signal(signal.SIGINT)
        assert ends(watching) == 130


def seen(watching: subprocess.Popen[bytes]) -> tuple[str, str | None, int | None]:
    event = json.loads(line_of(watching))
    return event["method"], event.get("session_id"), event.get("seq")


def test_the_events_of_one_session_are_watched_from_a_seq_on(shared: Home) -> None:
    session_id = shared.session(*ITEMS)
    shared.ok("new")
    with shared.running("watch", session_id, "--since", "1") as watching:
        line = line_of(watching).decode()
        assert f"{session_id} #2 history.appended" in line
        assert "last_entry_id 3" in line
        watching.send_signal(signal.SIGINT)
        assert ends(watching) == 130
        assert watching.stderr is not None
        assert watching.stderr.read() == b""


def test_a_session_that_is_not_there_cannot_be_watched(shared: Home) -> None:
    assert "not_found" in shared.fails(1, "watch", "no-such-session")


# Deleting and calling.


def test_a_session_is_deleted_once(shared: Home) -> None:
    session_id = shared.session(*ITEMS)
    assert shared.json("delete", session_id, "--yes") == {"deleted": True}
    ended = shared.run("delete", session_id)
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert b"no such session" in ended.stderr


@pytest.mark.parametrize(("answer", "code", "deleted"), [(b"n\n", 130, False), (b"y\n", 0, True)])
def test_on_a_terminal_a_deletion_is_asked_for(
    shared: Home, answer: bytes, code: int, deleted: bool
) -> None:
    session_id = shared.session()
    keyboard, terminal = pty.openpty()
    with (
        os.fdopen(keyboard, "wb", buffering=0) as typing,
        os.fdopen(terminal, "rb", buffering=0) as stdin,
        shared.running("delete", session_id, stdin=stdin) as process,
    ):
        typing.write(answer)
        assert ends(process) == code
    listed = shared.json("list", "--limit", "1000")["sessions"]
    assert (session_id not in [one["session_id"] for one in listed]) is deleted


def test_a_token_does_less_than_its_owner_until_it_is_revoked(shared: Home, tmp_path: Path) -> None:
    """PROTOCOL.md §7. It is presented from a file or a variable, never as an argument."""
    session_id = shared.session(*ITEMS)
    made = shared.run(
        *("token", "create", "an editor", "--scope", "session.read", "--session", session_id),
        *("--expires-in", "8h"),
    )
    assert made.returncode == 0
    token = made.stdout.decode().strip()
    (shown,) = shared.json("token", "list")["tokens"]
    assert shown["token_id"].encode() in made.stderr
    assert {shown["label"], *shown["scopes"], *shown["sessions"]} == {
        *("an editor", "session.read", session_id)
    }
    assert re.search(
        rf"^{shown['token_id']}  an editor  .*{session_id}  session.read$",
        (shared.ok("token", "list").decode()),
        re.MULTILINE,
    )

    file = tmp_path / "token"
    file.write_text(token + "\n")
    said = shared.fails(2, "list", "--token-file", str(file))
    assert "Others may read" in said
    assert token not in said
    file.chmod(0o600)
    from_file = ("--token-file", str(file))
    for listed in (
        shared.ok("list", "--json", *from_file),
        shared.ok("list", "--json", RECAPD_TOKEN=token),
    ):
        assert [one["session_id"] for one in json.loads(listed)["sessions"]] == [session_id]
    assert "forbidden" in shared.fails(1, "delete", session_id, "--yes", *from_file)
    assert "forbidden" in shared.fails(1, "token", "list", RECAPD_TOKEN=token)
    assert "No such file" in shared.fails(1, "list", "--token-file", str(tmp_path / "none"))

    shared.ok("token", "revoke", shown["token_id"])
    assert "unauthenticated" in shared.fails(1, "list", RECAPD_TOKEN=token)
    assert "no such token" in shared.fails(1, "token", "revoke", "--stdin", stdin=token.encode())
    found = shared.run("token", "create", "another", "--scope", "admin")
    shared.ok("token", "revoke", "--stdin", stdin=found.stdout)
    assert shared.json("token", "list") == {"tokens": []}
    for arguments in (
        ["revoke"],
        ["revoke", "x", "--stdin"],
        ["create", "x"],
        ["create", "x", "--scope", "everything"],
        ["create", "x", "--scope", "admin", "--expires-in", "soon"],
    ):
        shared.fails(2, "token", *arguments)


def test_the_daemon_does_not_inherit_the_token_of_who_starts_it(home: Home) -> None:
    home.run("start", RECAPD_TOKEN="recapd_not-for-its-environment")
    environment = Path(f"/proc/{home.pid()}/environ").read_bytes()
    assert b"RECAPD_HOME" in environment
    assert b"RECAPD_TOKEN" not in environment


def test_any_method_can_be_called(shared: Home) -> None:
    session_id = shared.session()
    result = shared.ok(
        *["call", "session.update", f"session_id={session_id}", "title=a=b"],
        'labels:={"n": "1"}',
    )
    assert json.loads(result)["session"]["title"] == "a=b"
    assert json.loads(result)["session"]["labels"] == {"n": "1"}
    assert json.loads(shared.ok("call", "rpc.discover"))["openrpc"]
    assert "method_not_found" in shared.fails(1, "call", "no.such.method")
    said = json.loads(shared.fails(1, "call", "session.list", "limit:=0", "--json"))
    assert said["error"]["data"]["reason"] == "invalid_params"
    assert said["error"]["data"]["errors"][0]["path"] == "$.limit"


# Terminals, pipes and what is imported.


def on_terminal(home: Home, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and all output of a command whose stdout and stderr are a terminal."""
    screen, terminal = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env=home.environment | environment,
    )
    os.close(terminal)
    said = b""
    deadline_s = time.monotonic() + WAIT_S
    try:
        while select.select([screen], [], [], deadline_s - time.monotonic())[0]:
            try:
                said += os.read(screen, 4096)
            except OSError:  # EIO: nobody has the other end open any more
                break
        return process.wait(WAIT_S), said.decode().replace("\r\n", "\n")
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def test_colour_is_for_terminals_that_want_it(shared: Home) -> None:
    coloured = on_terminal(shared, "show", "no-such-session")
    assert coloured[0] == 1
    assert "\x1b[31m" in coloured[1]
    assert "\x1b" not in on_terminal(shared, "show", "no-such-session", NO_COLOR="1")[1]
    assert "\x1b" not in shared.fails(1, "show", "no-such-session")


def test_a_history_goes_through_the_pager_of_a_terminal(shared: Home) -> None:
    session_id = shared.session(*ITEMS)
    code, said = on_terminal(shared, "show", session_id, PAGER="sed s/^/page:/")
    assert code == 0
    assert f"page:{session_id}" in said
    code, said = on_terminal(shared, "show", session_id, "--json", PAGER="sed s/^/page:/")
    assert "page:" not in said
    code, said = on_terminal(shared, "show", session_id, PAGER="head -n 1")
    assert (code, len(said.splitlines())) == (0, 1)


def test_a_compaction_on_a_terminal_draws_how_far_it_is_and_ends_the_same(shared: Home) -> None:
    session_id = shared.session(*ITEMS)
    code, said = on_terminal(shared, "compact", session_id, "--force")
    assert code == 0
    assert "archived: 1" in said
    code, said = on_terminal(shared, "compact", "no-such-session")
    assert code == 1
    assert "not_found" in said


def test_a_reader_that_has_had_enough_is_no_fault(shared: Home) -> None:
    session_id = shared.session(*[b'{"role":"user","content":"%b"}' % (b"x" * 1000)] * 1000)
    for arguments in (["export", session_id], ["show", session_id, "--full"]):
        with shared.running(*arguments) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
            assert ends(process) == 0


FORBIDDEN: Final = (
    *("httpx", "tiktoken", "rich", "jsonrpcserver", "aiosqlite", "sqlite3", "uvloop"),
    *("recapd.storage.sqlite", "recapd.daemon.lifecycle", "recapd.daemon.service"),
)


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "status",
        "start",
        "new",
        "list",
        "show SESSION",
        "export SESSION",
        "revisions SESSION",
        "compact SESSION --force",
        "restore SESSION 1",
        "rewind SESSION 0",
        "fork SESSION",
        "update SESSION --auto-compact-at 1000",
        "delete SESSION",
        "call protocol.ping",
    ],
)
def test_client_commands_import_nothing_that_only_the_daemon_needs(
    shared: Home, command: str
) -> None:
    session_id = shared.session(ITEMS[1])
    arguments = command.replace("SESSION", session_id).split()
    ended = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-m", "recapd.daemon", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=shared.environment,
        timeout=WAIT_S,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.decode().splitlines()}
    assert "recapd.daemon.cli" in imported
    assert imported.isdisjoint(FORBIDDEN)
