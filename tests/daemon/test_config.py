"""Settings: where they come from, and what is said of one that cannot be used (`config.py`)."""

import os
from pathlib import Path

import pytest

from recapd.daemon.config import ConfigError, Settings, resolve, settings_fields


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


def write(home: Path, text: str) -> dict[str, str]:
    """An environment in which the configuration file holds this."""
    (home / "recapd.toml").write_text(text)
    return {"RECAPD_HOME": str(home)}


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    home: Path,
) -> None:
    """config.py: defaults < file < environment < flag."""
    environment = {"RECAPD_HOME": str(home)}
    assert resolve({}, environment).in_flight_max == 64
    environment = write(home, "in_flight_max = 1\nredact_summary_source = false\n")
    assert resolve({}, environment).in_flight_max == 1
    environment["RECAPD_IN_FLIGHT_MAX"] = "2"
    assert resolve({"in_flight_max": None}, environment).in_flight_max == 2
    settings = resolve({"in_flight_max": 3}, environment)
    assert (settings.in_flight_max, settings.redact_summary_source) == (3, False)


def test_each_setting_has_a_variable_and_a_place_in_the_file(home: Path) -> None:
    """STYLE: each flag names its variable; whatever is set there is what is used."""
    others: dict[str, str] = {
        "data_dir": "/data",
        "socket": "/run/x.sock",
        "log_level": "debug",
        "log_format": "json",
        "reminders": "issued",
        "redact_summary_source": "no",
        "default_summarizer": "chat",
    }
    for field in settings_fields():
        value = others.get(field.name) or str(field.metadata["least"] + 1)
        given = resolve({}, {"RECAPD_HOME": str(home), f"RECAPD_{field.name.upper()}": value})
        default = resolve({}, {"RECAPD_HOME": str(home)})
        assert getattr(given, field.name) != getattr(default, field.name), field.name
        assert field.metadata["text"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("in_flight_max = 0", "in_flight_max"),
        ("in_flight_max = 1.5", "in_flight_max"),
        ("in_flight_max = true", "in_flight_max"),
        ('in_flight_max = "hunter2"', "in_flight_max"),
        ("depth_max = 401", "depth_max"),
        ("frame_bytes_max = 1000", "frame_bytes_max"),
        ('log_level = "hunter2"', "log_level"),
        ('log_format = ["hunter2"]', "log_format"),
        ('redact_summary_source = "hunter2"', "redact_summary_source"),
        ("socket = 3", "socket"),
        ('hunter2 = "x"', "recapd.toml"),
        ("[hunter2]", "recapd.toml"),
        ("hunter2", "recapd.toml"),
        ('a = "\ud800"', "recapd.toml"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_and_its_value_is_not(
    home: Path, text: str, said: str
) -> None:
    """config.py: a value may be a secret that went into the wrong place."""
    (home / "recapd.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        resolve({}, {"RECAPD_HOME": str(home)})
    assert said in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert str(home) not in str(caught.value)


def test_a_configuration_that_cannot_be_read_is_an_error(home: Path) -> None:
    (home / "recapd.toml").mkdir()
    with pytest.raises(ConfigError):
        resolve({}, {"RECAPD_HOME": str(home)})


def test_one_folder_may_hold_everything(home: Path) -> None:
    """PROTOCOL.md §1, "Socket path": `$RECAPD_HOME`."""
    settings = resolve({}, {"RECAPD_HOME": str(home), "XDG_RUNTIME_DIR": "/run/user/1"})
    assert (settings.data_dir, settings.socket) == (home, home / "rpc.sock")


def test_the_socket_lies_in_the_runtime_folder_or_beside_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROTOCOL.md §1, "Socket path": never a predictable name in a folder that all may write to."""
    for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    state = tmp_path / "recapd"
    assert resolve({}, {}).data_dir == state
    assert resolve({}, {}).socket == state / "run" / "rpc.sock"
    runtime = {"XDG_RUNTIME_DIR": "/run/user/1"}
    assert resolve({}, runtime).socket == Path("/run/user/1/recapd/rpc.sock")
    # Any other store has a socket of its own.
    sockets = {resolve({"data_dir": name}, runtime).socket for name in ("/a", "/b", str(state))}
    assert len(sockets) == 3
    assert all(socket.parent == Path("/run/user/1/recapd") for socket in sockets)
    assert resolve({"data_dir": "/a"}, {}).socket == Path("/a/run/rpc.sock")
    for environment, flags in (
        ({**runtime, "RECAPD_SOCKET": "/x.sock"}, {}),
        ({**runtime, "RECAPD_SOCKET": "/y.sock"}, {"socket": "/x.sock"}),
    ):
        assert resolve(flags, environment).socket == Path("/x.sock")


def test_paths_are_absolute_whatever_the_current_folder_will_be(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    settings = resolve({"data_dir": "a/../b", "socket": "s"}, {"RECAPD_HOME": str(home)})
    assert (settings.data_dir, settings.socket) == (home / "b", home / "s")
    monkeypatch.setenv("HOME", str(home))
    settings = resolve({"data_dir": "~/c"}, {"RECAPD_HOME": str(home)})
    assert settings.data_dir == home / "c"


@pytest.mark.parametrize("letter", ["x", "é"])
def test_a_socket_path_has_107_bytes_at_most(home: Path, letter: str) -> None:
    """PROTOCOL.md §1: bytes, not characters; unix(7)."""
    environment = {"RECAPD_HOME": str(home)}
    fits = f"/{letter}".ljust(107 - len(os.fsencode(letter)) + 1, "y")
    assert len(os.fsencode(fits)) == 107
    assert resolve({"socket": fits}, environment).socket == Path(fits)
    with pytest.raises(ConfigError, match="107 bytes"):
        resolve({"socket": fits + "y"}, environment)


def test_an_item_of_the_greatest_size_fits_into_a_frame() -> None:
    settings = Settings()
    assert settings.item_bytes_max < settings.frame_bytes_max
