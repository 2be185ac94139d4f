"""The examples of the reference, sent to a real daemon one after the other."""

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from recapd.protocol.items import is_array, is_object
from recapd.protocol.schema import openrpc_json

jsonschema: Any = importlib.import_module("jsonschema")  # which has no types

WAIT_S: Final = 30

ORDER: Final = (
    *("protocol.initialize", "protocol.ping", "rpc.discover", "server.info", "server.health"),
    *("session.create", "session.append", "session.list", "session.get"),
    *("session.subscribe", "session.unsubscribe", "session.events"),
    *("session.compact", "operation.get", "operation.cancel"),
    *("session.revisions", "session.restore", "session.rewind", "session.fork"),
    *("session.export", "session.update", "session.verify", "session.delete"),
    *("token.create", "token.list", "token.revoke"),
    "server.shutdown",
)
"""In which one example makes what the next needs."""

MAY_BE_EMPTY: Final = frozenset({"warnings", "faults"})


@pytest.fixture
def peer() -> Generator[socket.socket]:
    """A connection to a daemon of its own."""
    with tempfile.TemporaryDirectory(prefix="recapd-") as folder:
        path = Path(folder) / "s"
        ready, writing = os.pipe()
        daemon = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "recapd.daemon", "serve"),
                *("--data-dir", folder, "--socket", str(path), "--ready-fd", str(writing)),
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
        )
        os.close(writing)
        try:
            with open(ready, "rb") as told:
                assert told.read() == b"ready\n"
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(WAIT_S)
                connection.connect(str(path))
                yield connection
        finally:
            daemon.kill()
            daemon.wait(WAIT_S)


def shape(value: Any, name: str = "") -> Any:
    """A JSON value with types in place of strings and numbers."""
    if is_object(value):
        return {name: shape(member, name) for name, member in value.items()}
    if is_array(value):
        return [] if name in MAY_BE_EMPTY else [shape(member) for member in value[:1]]
    return type(value).__name__


def test_a_daemon_answers_every_example_in_its_shape(peer: socket.socket) -> None:
    """All by the schemas; and, but for the document itself, with the members that are shown."""
    document = json.loads(openrpc_json())
    methods = {method["name"]: method for method in document["methods"]}
    assert set(ORDER) == methods.keys()
    frames = peer.makefile("rwb")
    for name in ORDER:
        (example,) = methods[name]["examples"]
        params = {param["name"]: param["value"] for param in example["params"]}
        request = {"jsonrpc": "2.0", "id": name, "method": name, "params": params}
        frames.write(json.dumps(request).encode() + b"\n")
        frames.flush()
        answer = next(message for message in map(json.loads, frames) if "id" in message)
        assert answer["id"] == name
        if name == "operation.cancel":
            # Nothing is slow enough to be cancelled for certain.
            assert answer["error"]["data"]["reason"] == "not_found"
            continue
        result = answer["result"]
        schema = {"allOf": [methods[name]["result"]["schema"]]}
        jsonschema.Draft7Validator(schema | {"components": document["components"]}).validate(result)
        if name == "rpc.discover":
            assert result == document
        else:
            assert shape(result) == shape(example["result"]["value"]), name
