"""What the README shows is what happens: its session, its program and its demonstration."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

WAIT_S = 60


@pytest.fixture
def home() -> Generator[dict[str, str]]:
    """An environment with a store of its own, and `recapd` on the path."""
    with tempfile.TemporaryDirectory(prefix="recapd-") as folder:
        program = Path(folder) / "recapd"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m recapd.daemon "$@"\n')
        program.chmod(0o700)
        environment = {
            **os.environ,
            "RECAPD_HOME": f"{folder}/home",
            "PATH": f"{folder}:{os.environ['PATH']}",
        }
        try:
            yield environment
        finally:
            subprocess.run([program, "stop"], env=environment, capture_output=True, timeout=WAIT_S)


def code_blocks(project_root: Path, language: str) -> list[str]:
    text = (project_root / "README.md").read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def without_what_differs(text: str) -> str:
    """Times, hashes and sizes of archives differ from run to run."""
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z", "TIME", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "SHA256", text)
    return re.sub(r"\b\d+\.\d KiB\b", "SIZE", text)


def test_the_session_in_the_readme_gives_the_output_shown_there(
    project_root: Path, home: dict[str, str]
) -> None:
    """Each line after `$` is typed; what stands below it is all that is printed."""
    session = code_blocks(project_root, "console")[0]
    for step in session.split("$ ")[1:]:
        command, _, shown = step.partition("\n")
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=project_root,
            env=home,
            capture_output=True,
            timeout=WAIT_S,
            check=True,
        )
        printed = (done.stdout + done.stderr).decode()
        assert without_what_differs(printed) == without_what_differs(shown), command


def test_the_program_in_the_readme_runs(project_root: Path, home: dict[str, str]) -> None:
    """It is given the socket of a daemon, as any program that copies it would."""
    (source,) = code_blocks(project_root, "python")
    subprocess.run(["recapd", "start"], env=home, capture_output=True, timeout=WAIT_S, check=True)
    source += f"\nanyio.run(main, Path({home['RECAPD_HOME'] + '/rpc.sock'!r}))\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", source],
        env=home,
        capture_output=True,
        timeout=WAIT_S,
        check=True,
    )
    assert done.stdout.decode().splitlines() == [
        "2 entries are durable",
        "archived as revision 1",
        '1 {"role": "developer", "content": "Be brief."}',
        '2 {"role": "user", "content": "Hi!"}',
    ]


def test_the_demonstration_verifies_all_that_it_claims(project_root: Path) -> None:
    """`scripts/run` ends with a plain statement, and with 1 if it cannot make it."""
    done = subprocess.run(
        [sys.executable, "-P", project_root / "scripts" / "demo.py"],
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode().endswith("\nall of it holds\n")
