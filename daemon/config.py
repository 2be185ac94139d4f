"""All settings, in one place: defaults < file < environment < flag.

The file is TOML with the names of the fields below; the variable of a field is `RECAPD_` and its
name in capitals, its flag `--` and its name with hyphens. `RECAPD_HOME` puts configuration, data
and socket into one folder. How models are asked stands in tables, only in the file:

    [summarizers.chat]  # or responses, or anthropic
    base_url = "http://127.0.0.1:8080/v1"
    model = "…"
    key_env = "…"  # or key_file = "…", or key_command = ["…"]
    window_tokens = 128000
"""

import contextlib
import hashlib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args, get_origin, get_type_hints

import platformdirs

from recapd.daemon.compaction.summarise.settings import Kind, OnlineSettings
from recapd.protocol.items import is_array, is_object
from recapd.protocol.messages import Summarizer

SOCKET_PATH_BYTES_MAX: Final = 107
"""What Linux takes in `sun_path`, less the closing NUL (unix(7)); other systems take a little less.
"""


ENVELOPE_BYTES: Final = 1 << 18
"""Of an answer beside its entries: title, cwd, labels and instructions at their longest, and a long
list of archived revisions."""


class ConfigError(Exception):
    """A setting that cannot be used. The text names the setting and where it came from, never its
    value.
    """


def _setting(default: Any, text: str, *, least: int = 0, most: int = 2**40) -> Any:
    return field(default=default, metadata={"text": text, "least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a daemon runs with; `resolve` makes it. Sizes in bytes, times in seconds where the name
    says `_s`.
    """

    data_dir: Path = _setting(None, "folder of the store")  # noqa: RUF009  # `resolve` sets it
    socket: Path = _setting(None, "path of the socket")  # noqa: RUF009
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least level logged")
    log_format: Literal["text", "json"] = _setting("text", "form of a log line")

    frame_bytes_max: int = _setting(16 << 20, "longest frame, each way", least=1 << 20)
    batch_max: int = _setting(128, "entries of a batch", least=1)
    in_flight_max: int = _setting(64, "requests under way on a connection", least=1)
    depth_max: int = _setting(128, "nesting of arrays and objects", least=8, most=400)
    connections_max: int = _setting(256, "connections at once", least=1)
    subscriptions_max: int = _setting(256, "subscriptions of a connection", least=1)
    items_per_append_max: int = _setting(1000, "items of one append", least=1)

    context_limit: int = _setting(20_000, "tokens of a history after compaction", least=1)
    reminders: Literal["all", "issued"] = _setting(
        "all", "which reminders are kept: all, or those that recapd made"
    )
    summary_characters_max: int = _setting(8_000, "length of an offline summary", least=200)
    default_summarizer: Summarizer = _setting("offline", "summarizer where none is named")  # noqa: RUF009
    redact_summary_source: bool = _setting(True, "replace secret shapes in what is summarised")
    breaker_failures: int = _setting(
        3, "automatic compactions that fail in a row until they wait", least=1
    )
    breaker_wait_s: int = _setting(600, "how long they wait before one is tried", least=1)
    summarizers: tuple[OnlineSettings, ...] = ()  # tables of the file; no flag and no variable

    drain_timeout_s: int = _setting(3, "time for what is under way when stopping", least=0)
    send_timeout_s: int = _setting(30, "time in which a client must take what was sent", least=1)
    frame_timeout_s: int = _setting(60, "time in which a frame that has begun must end", least=1)

    @property
    def item_bytes_max(self) -> int:
        """An item fits into a frame together with its envelope, both as sent and as read back."""
        return self.frame_bytes_max - ENVELOPE_BYTES


_TYPES: Final = get_type_hints(Settings)


def settings_fields() -> tuple[Field[Any], ...]:
    """The fields of Settings, for the flags of the command line and the documents."""
    return tuple(field for field in fields(Settings) if "text" in field.metadata)


def resolve(flags: Mapping[str, object], environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings in force. `flags` by field name; None: not given.

    Raises ConfigError.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    home = environment.get("RECAPD_HOME")
    file = (
        Path(home) / "recapd.toml"
        if home
        else platformdirs.user_config_path("recapd") / "recapd.toml"
    )
    values: dict[str, Any] = {}
    for source, raw in (
        (str(file.name), _read_file(file)),
        ("environment", _read_environment(environment)),
        ("flag", given),
    ):
        for name, value in raw.items():
            convert = _summarizers if name == "summarizers" else partial(_convert, name)
            values[name] = convert(value, source)
    default_data = Path(home) if home else platformdirs.user_state_path("recapd")
    data = values.setdefault("data_dir", default_data)
    values["data_dir"] = data = Path(os.path.abspath(data))
    if "socket" not in values:
        values["socket"] = _default_socket(
            data, data == Path(os.path.abspath(default_data)), home, environment
        )
    values["socket"] = Path(os.path.abspath(values["socket"]))
    if len(os.fsencode(values["socket"])) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the path of the socket is longer than {SOCKET_PATH_BYTES_MAX} bytes:"
            " give a shorter one with --socket or RECAPD_SOCKET"
        )
    return replace(Settings(), **values)


def _default_socket(
    data: Path, is_default: bool, home: str | None, environment: Mapping[str, str]
) -> Path:
    if home and is_default:
        return data / "rpc.sock"
    runtime = environment.get("XDG_RUNTIME_DIR")
    if not runtime:
        return data / "run" / "rpc.sock"
    name = (
        "rpc.sock"
        if is_default
        else f"rpc-{hashlib.sha256(os.fsencode(data)).hexdigest()[:16]}.sock"
    )
    return Path(runtime) / "recapd" / name


def _read_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} cannot be read: {type(error).__name__}") from error
    for name in values:
        if name not in _TYPES:
            raise ConfigError(f"{path.name}: there is no setting of one of the names in it")
    return values


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    names = [field.name for field in settings_fields()]
    named = {name: environment.get(f"RECAPD_{name.upper()}") for name in names}
    return {name: value for name, value in named.items() if value}


def _convert(name: str, value: object, source: str) -> object:
    kind = _TYPES[name]
    setting = next(one for one in settings_fields() if one.name == name)
    least, most = setting.metadata["least"], setting.metadata["most"]
    return _value(kind, value, f"{name} ({source})", least, most)


def _summarizers(value: object, source: str) -> tuple[OnlineSettings, ...]:
    """The tables `[summarizers.KIND]`; what is missing in one is said when it is used."""
    if not is_object(value) or any(kind not in get_args(Kind) for kind in value):
        kinds = " or ".join(f"[summarizers.{kind}]" for kind in get_args(Kind))
        raise ConfigError(f"summarizers ({source}) must be tables: {kinds}")
    return tuple(
        OnlineSettings(kind=cast("Kind", kind), **_summarizer(table, f"summarizers.{kind}", source))
        for kind, table in value.items()
    )


_SUMMARIZER_TYPES: Final = get_type_hints(OnlineSettings)
_SUMMARIZER_FIELDS: Final = {field.name: field for field in fields(OnlineSettings)}


def _summarizer(table: object, where: str, source: str) -> dict[str, Any]:
    if not is_object(table) or not table.keys() <= _SUMMARIZER_TYPES.keys() - {"kind"}:
        names = ", ".join(name for name in _SUMMARIZER_TYPES if name != "kind")
        raise ConfigError(f"[{where}] ({source}) takes only {names}")
    return {
        name: _value(
            _SUMMARIZER_TYPES[name],
            value,
            f"{where}.{name} ({source})",
            _SUMMARIZER_FIELDS[name].metadata["least"],
            2**31,
        )
        for name, value in table.items()
    }


def _value(kind: Any, value: object, where: str, least: int, most: int) -> object:
    """`value` as the type `kind`; Raises ConfigError, which says `where`."""
    problem: str
    if kind in (Path, Path | None):
        if isinstance(value, str | Path) and str(value):
            return Path(value).expanduser()
        problem = "a path"
    elif kind is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "1", "yes", "false", "0", "no"):
            return value.lower() in ("true", "1", "yes")
        problem = "true or false"
    elif kind in (int, float):
        number: int | float | None = None
        if isinstance(value, int | str | kind) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                number = kind(value)
        if number is not None and least <= number <= most:
            return number
        problem = f"a {'whole ' if kind is int else ''}number from {least} to {most}"
    elif kind is str:
        if isinstance(value, str):
            return value
        problem = "a string"
    elif get_origin(kind) is tuple:
        if is_array(value) and value and all(isinstance(part, str) for part in value):
            return tuple(value)
        problem = "an array of strings"
    elif value in get_args(kind):
        return value
    else:
        problem = " or ".join(map(str, get_args(kind)))
    raise ConfigError(f"{where} must be {problem}")
