"""Where a model is asked, and with which key."""

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from recapd.daemon.compaction.summarise.keys import Key, read_key
from recapd.daemon.compaction.summarise.settings import OnlineSettings
from recapd.daemon.config import ConfigError, resolve
from recapd.protocol.errors import CompactionFailed


def settings(**more: Any) -> OnlineSettings:
    return OnlineSettings(kind="responses", model="m", **more)


async def key_of(environment: dict[str, str] | None = None, **more: Any) -> str | None:
    key = await read_key(settings(**more), environment or {})
    return None if key is None else key.reveal()


async def refused(environment: dict[str, str] | None = None, **more: Any) -> CompactionFailed:
    with pytest.raises(CompactionFailed) as caught:
        await key_of(environment, **more)
    assert caught.value.data["stage"] == "configure"
    return caught.value


def test_a_key_shows_itself_to_nobody() -> None:
    key = Key("s3cret")
    assert "s3cret" not in f"{key!r}{key}{[key]}{key.reveal.__doc__}"
    with pytest.raises(TypeError):
        pickle.dumps(key)


async def test_a_key_comes_from_a_variable() -> None:
    assert await key_of({"K": " abc\n"}, key_env="K") == "abc"
    assert await key_of() is None
    await refused({}, key_env="K")


@pytest.mark.parametrize(
    "value", ["", " ", "two words", "line\nbreak", "kéy", "\udcff", "x" * 20_000]
)
async def test_what_cannot_be_a_key_is_refused_without_showing_it(value: str) -> None:
    """httpx and h11 repeat a header's value where they refuse it."""
    error = await refused({"K": value}, key_env="K")
    assert not value.strip() or value not in repr(error) + str(error.to_wire())


async def test_a_key_comes_from_a_file_that_is_private(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("abc\n")
    file.chmod(0o600)
    assert await key_of(key_file=file) == "abc"
    file.chmod(0o400)
    assert await key_of(key_file=file) == "abc"
    for mode in (0o640, 0o604, 0o644):
        file.chmod(mode)
        assert "0600" in str((await refused(key_file=file)).hint)
    await refused(key_file=tmp_path)
    await refused(key_file=tmp_path / "none")


async def test_a_key_comes_from_a_command() -> None:
    assert await key_of(key_command=(sys.executable, "-c", "print('abc')")) == "abc"
    failing = (sys.executable, "-c", "print('abc'); raise SystemExit(1)")
    error = await refused(key_command=failing)
    assert "abc" not in repr(error) + repr(error.__cause__)
    await refused(key_command=("/nowhere/at/all",))
    await refused(key_command=("yes",))  # it prints without end


@pytest.mark.parametrize(
    "more",
    [
        {"model": ""},
        {"key_env": "A", "key_command": ("b",)},
        {"base_url": "ftp://host"},
        {"base_url": "http://"},
        {"base_url": "http://user:word@host/v1"},
        {"base_url": "http://host/v1?key=abc"},
        {"base_url": "http://host:port"},
        {"kind": "chat"},
    ],
)
def test_settings_that_do_not_say_whom_to_ask_are_one_clear_error(more: dict[str, Any]) -> None:
    given: dict[str, Any] = {"kind": "responses", "model": "m"} | more
    with pytest.raises(CompactionFailed) as caught:
        OnlineSettings(**given).checked()
    assert caught.value.data["stage"] == "configure"
    assert caught.value.hint


def test_the_tables_of_the_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "recapd.toml").write_text(
        "[summarizers.chat]\n"
        "base_url = 'http://127.0.0.1:8080/v1/'\nmodel = 'local'\nwindow_tokens = 32000\n"
        "key_command = ['pass', 'show', 'x']\nstream = false\n"
        "[summarizers.anthropic]\nmodel = 'm'\nkey_file = '/k'\nattempt_timeout_s = 2.5\n"
    )
    chat, anthropic = resolve({}, {"RECAPD_HOME": str(tmp_path)}).summarizers
    assert chat.checked().base_url == "http://127.0.0.1:8080/v1"
    assert (chat.window_tokens, chat.stream) == (32_000, False)
    assert chat.key_command == ("pass", "show", "x")
    assert (anthropic.kind, anthropic.key_file) == ("anthropic", Path("/k"))
    assert anthropic.attempt_timeout_s == 2.5
    assert resolve({}, {"RECAPD_HOME": str(tmp_path / "none")}).summarizers == ()


@pytest.mark.parametrize(
    "text",
    [
        "summarizers = 5",
        "[summarizers.other]\nmodel = 'm'",
        "[summarizers.chat]\nkey = 's3cret'",
        "[summarizers.chat]\nmodel = 5",
        "[summarizers.chat]\nwindow_tokens = 10",
        "[summarizers.chat]\nwindow_tokens = 1e9",
        "[summarizers.chat]\ndeadline_s = nan",
        "[summarizers.chat]\ndeadline_s = inf",
        "[summarizers.chat]\nkey_command = 's3cret'",
    ],
)
def test_a_table_that_cannot_be_read_says_where(tmp_path: Path, text: str) -> None:
    (tmp_path / "recapd.toml").write_text(text)
    with pytest.raises(ConfigError, match="summarizers") as caught:
        resolve({}, {"RECAPD_HOME": str(tmp_path)})
    assert "s3cret" not in str(caught.value)
