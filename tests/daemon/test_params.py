"""Every parameter of every method with values of every other kind (PROMISES.md J1).

What the published schema refuses is one `invalid_params` that names the place; what it allows may
be refused for another reason of the contract; nothing is ever an internal error.
"""

import importlib
import json
from typing import Any, Final

import pytest
from tests.daemon.conftest import Daemon, Peer

from recapd.protocol.errors import RpcError
from recapd.protocol.methods import COMMON_ERRORS, METHODS, OPERATION_ERRORS
from recapd.protocol.schema import openrpc_json

jsonschema: Any = importlib.import_module("jsonschema")  # which has no types

DOCUMENT: Final[dict[str, Any]] = json.loads(openrpc_json())
BY_NAME: Final[dict[str, Any]] = {method["name"]: method for method in DOCUMENT["methods"]}

VALUES: Final[list[Any]] = [
    *(None, True, False, 0, 1, -1, 2**53, 2**63, 2**64, -(10**30), 1.5, 1e300, -0.0),
    *("", "a", "talk", "a" * 129, "x" * 70_000, "\x00", "../a", "a\n", "é", "\u202e", "2026-12-01"),
    *([], {}, [None], [[]], ["a"], [{}], [1], {"a": 1}, {"": None}, {"type": "x"}, [["a"] * 300]),
    *([{"role": "user", "content": None}], {"at_tokens": 5000}, {"threshold": "no"}, {"part": 0}),
]
NOT_ASKED: Final = {("server.shutdown", "mode"), ("server.shutdown", "deadline_ms")}
"""What would end the daemon where the value is a good one."""


def validator(schema: Any) -> Any:
    return jsonschema.Draft7Validator({"allOf": [schema], "components": DOCUMENT["components"]})


CASES: Final = [
    (name, param["name"]) for name, method in BY_NAME.items() for param in method["params"]
]


@pytest.mark.promise("J1")
@pytest.mark.parametrize("name", METHODS)
async def test_a_parameter_of_the_wrong_kind_is_named(
    daemon: Daemon, peer: Peer, name: str
) -> None:
    method = BY_NAME[name]
    (example,) = method["examples"]
    good = {param["name"]: param["value"] for param in example["params"]}
    errors: list[type[RpcError]] = [*COMMON_ERRORS, *OPERATION_ERRORS, *METHODS[name].errors]
    allowed = {error.reason for error in errors}
    await peer.call("session.create", session_id="talk", items=[{"role": "user", "content": "x"}])
    for param in method["params"]:
        schema = validator(param["schema"])
        for value in VALUES:
            valid = schema.is_valid(value)
            if (valid and (name, param["name"]) in NOT_ASKED) or param["name"] == "wait_ms":
                continue
            async with daemon.connect() as other:  # `protocol.initialize` is a first request
                params = {**good, param["name"]: value}
                answer = await other.answer(await other.ask(name, **params))
            if "result" in answer:
                assert valid, (param["name"], value)
                continue
            data = answer["error"]["data"]
            assert data["reason"] in allowed, (param["name"], value, data)
            if not valid:
                assert data["reason"] in ("invalid_params", "invalid_item"), (param["name"], value)
                path = data["errors"][0]["path"]
                assert path == "$" or path.startswith(f"$.{param['name']}"), (value, path)
    assert await peer.call("protocol.ping")


@pytest.mark.promise("J1")
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("params", [[], ["talk"], None, "x", 7, {"no such": 1}, {"session_id": []}])
async def test_parameters_are_an_object_with_known_names(
    peer: Peer, name: str, params: Any
) -> None:
    request = {"jsonrpc": "2.0", "id": 1, "method": name, "params": params}
    if name == "server.shutdown" and params == []:
        return
    await peer.say(request)
    answer = await peer.answer(1)
    if "error" in answer:
        assert answer["error"]["data"]["reason"] in ("invalid_params", "invalid_request")
    else:
        assert params == []
