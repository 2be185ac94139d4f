"""The documents that are made from the tables: openrpc.json and docs/protocol.md.

The rules cited are those of the OpenRPC specification 1.3 (spec.open-rpc.org).
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from recapd.daemon.config import settings_fields
from recapd.protocol import messages as m
from recapd.protocol.errors import ERRORS
from recapd.protocol.examples import EXAMPLES
from recapd.protocol.items import is_array, is_object
from recapd.protocol.methods import (
    CLIENT_NOTIFICATIONS,
    COMMON_ERRORS,
    METHODS,
    NOTIFICATIONS,
    OPERATION_ERRORS,
    SCOPES,
)
from recapd.protocol.schema import openrpc_document, openrpc_json, schema_sha256

jsonschema: Any = importlib.import_module("jsonschema")  # which has no types

DOCUMENT: dict[str, Any] = msgspec.json.decode(openrpc_json())
METHOD_OBJECTS: list[dict[str, Any]] = DOCUMENT["methods"]
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]

ALLOWED = {
    "document": ({"openrpc", "info", "methods"}, {"components", "servers", "externalDocs"}),
    "info": ({"title", "version"}, {"description", "license", "contact", "termsOfService"}),
    "method": (
        {"name", "params"},
        {"summary", "description", "paramStructure", "result", "errors", "examples", "tags"},
    ),
    "descriptor": ({"name", "schema"}, {"summary", "description", "required", "deprecated"}),
    "example": ({"name", "params"}, {"description", "summary", "result"}),
    "value": ({"name", "value"}, {"description", "summary"}),
    "error": ({"code", "message"}, {"data"}),
}
"""Of each kind of object: the members that it must have, and those that it may have."""


def walk(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value."""
    if is_object(value):
        yield value
        for member in value.values():
            yield from walk(member)
    elif is_array(value):
        for member in value:
            yield from walk(member)


def resolve(reference: str) -> Any:
    value: Any = DOCUMENT
    for name in reference.removeprefix("#/").split("/"):
        value = value[name]
    return value


def validator(schema: dict[str, Any]) -> Any:
    """For values of a schema that refers to others of the document."""
    return jsonschema.Draft7Validator({"allOf": [schema], "components": DOCUMENT["components"]})


# OpenRPC.


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every OpenRPC object of the document, with its kind."""
    yield "document", DOCUMENT
    yield "info", DOCUMENT["info"]
    for error in DOCUMENT["components"]["errors"].values():
        yield "error", error
    for method in METHOD_OBJECTS:
        yield "method", method
        for descriptor in (*method["params"], method["result"]):
            yield "descriptor", descriptor
        for example in method["examples"]:
            yield "example", example
            for value in (*example["params"], example["result"]):
                yield "value", value


def test_every_object_has_the_members_that_openrpc_asks_for_and_no_others() -> None:
    for kind, one in objects():
        required, optional = ALLOWED[kind]
        assert required <= one.keys(), one
        extensions = {name for name in one if name.startswith("x-") and kind != "error"}
        assert one.keys() <= required | optional | extensions, one


def test_names_are_unique_where_openrpc_asks_for_it() -> None:
    """Of methods, and of the parameters of a method."""
    names = [method["name"] for method in METHOD_OBJECTS]
    assert len(names) == len(set(names)) == len(METHODS)
    for method in METHOD_OBJECTS:
        params = [param["name"] for param in method["params"]]
        assert len(params) == len(set(params)), method["name"]


def test_the_errors_of_a_method_have_different_codes() -> None:
    """OpenRPC tells errors apart by code; the reasons behind them stand in `x-reasons`."""
    errors = DOCUMENT["components"]["errors"]
    for method in METHOD_OBJECTS:
        codes = [resolve(error["$ref"])["code"] for error in method["errors"]]
        assert len(codes) == len(set(codes)), method["name"]
        assert set(codes) == {errors[reason]["code"] for reason in method["x-reasons"]}


def test_required_parameters_come_before_the_others() -> None:
    for method in METHOD_OBJECTS:
        required = [param["required"] for param in method["params"]]
        assert required == sorted(required, reverse=True), method["name"]


def test_every_reference_leads_somewhere_and_every_schema_is_referred_to() -> None:
    references = Counter(one["$ref"] for one in walk(DOCUMENT) if "$ref" in one)
    for reference in references:
        resolve(reference)
    assert {f"#/components/schemas/{name}" for name in SCHEMAS} <= references.keys()


def test_every_schema_follows_json_schema_draft_7() -> None:
    for kind, one in objects():
        if kind == "descriptor":
            jsonschema.Draft7Validator.check_schema(one["schema"])
    for schema in SCHEMAS.values():
        jsonschema.Draft7Validator.check_schema(schema)
        for inner in walk(schema):  # whose siblings a draft 7 reader does not see
            assert "$ref" not in inner or len(inner) == 1, schema["title"]


def test_the_defaults_are_allowed_values() -> None:
    for method in METHOD_OBJECTS:
        for param in method["params"]:
            schema = param["schema"]
            if "default" in schema:
                assert not param["required"]
                validator(schema).validate(schema["default"])


# What the tables say.


def test_the_document_has_what_the_tables_have() -> None:
    assert [method["name"] for method in METHOD_OBJECTS] == list(METHODS)
    for method in METHOD_OBJECTS:
        row = METHODS[method["name"]]
        assert method.get("x-scope") == row.scope
        assert method["x-reasons"] == [error.reason for error in row.errors]
        assert method["paramStructure"] == "by-name"
    notifications = [one["name"] for one in DOCUMENT["x-notifications"]]
    assert notifications == [one.name for one in NOTIFICATIONS]
    assert [one["name"] for one in DOCUMENT["x-client-notifications"]] == [
        one.name for one in CLIENT_NOTIFICATIONS
    ]
    assert DOCUMENT["x-reasons"].keys() == {error.reason for error in ERRORS}


def test_an_error_that_any_request_may_meet_is_listed_once() -> None:
    assert DOCUMENT["x-common-reasons"] == [error.reason for error in COMMON_ERRORS]
    for method in METHODS.values():
        assert not set(method.errors) & set(COMMON_ERRORS), method.name
        assert len(method.errors) == len(set(method.errors)), method.name


def test_every_error_can_come_from_somewhere() -> None:
    of_requests = {error for method in METHODS.values() for error in method.errors}
    assert {*COMMON_ERRORS, *OPERATION_ERRORS, *of_requests} == set(ERRORS)
    assert of_requests.isdisjoint(OPERATION_ERRORS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
def test_an_error_on_the_wire_has_the_data_that_its_schema_says(error: Any) -> None:
    schema = DOCUMENT["x-reasons"][error.reason]["data"]
    arguments = {
        name: {int: 7, str: "x"}.get(kind, [])
        for name, kind in get_type_hints(error.__init__).items()
        if name not in ("retryable", "data", "return") and NoneType not in get_args(kind)
    }
    wire = error(**arguments).to_wire()
    assert wire["code"] == DOCUMENT["components"]["errors"][error.reason]["code"]
    assert wire["message"] == DOCUMENT["components"]["errors"][error.reason]["message"]
    validator(schema).validate(wire["data"])
    with pytest.raises(jsonschema.ValidationError):
        validator(schema).validate({**wire["data"], "reason": "another"})


def structures() -> list[type[msgspec.Struct]]:
    found = inspect.getmembers(m, inspect.isclass)
    return [
        kind
        for _, kind in found
        if issubclass(kind, msgspec.Struct) and kind.__module__ == m.__name__
    ]


@pytest.mark.parametrize("kind", structures(), ids=lambda kind: kind.__name__)
def test_every_structure_says_in_a_sentence_what_it_is(kind: type[msgspec.Struct]) -> None:
    """In its own words: the documents show them, and a base class's would say nothing."""
    assert "__doc__" in vars(kind)
    assert re.fullmatch(r"[`A-Z][^\n]*\.", kind.__doc__ or ""), kind.__doc__


# Examples.


def test_every_method_has_an_example() -> None:
    assert list(EXAMPLES) == list(METHODS)


@pytest.mark.parametrize("method", METHOD_OBJECTS, ids=lambda method: method["name"])
def test_an_example_is_what_the_method_takes_and_gives(method: dict[str, Any]) -> None:
    """By the schemas, and by the types that the server decodes with."""
    row = METHODS[method["name"]]
    (example,) = method["examples"]
    params = {param["name"]: param["value"] for param in example["params"]}
    schemas = {param["name"]: param["schema"] for param in method["params"]}
    for name, value in params.items():
        validator(schemas[name]).validate(value)
    assert {param["name"] for param in method["params"] if param["required"]} <= params.keys()
    result = example["result"]["value"]
    validator(method["result"]["schema"]).validate(result)
    taken = msgspec.json.decode(msgspec.json.encode(params), type=row.params)
    assert taken == EXAMPLES[row.name][0]
    msgspec.json.decode(msgspec.json.encode(result), type=row.result)


def test_a_result_without_a_required_member_is_told_apart() -> None:
    """Otherwise the test above could not fail."""
    assert not validator({"$ref": "#/components/schemas/Session"}).is_valid({"session_id": "x"})


# The committed files.


def test_discovery_gives_the_committed_document(project_root: Path) -> None:
    assert (project_root / "openrpc.json").read_bytes() == openrpc_json()
    given = msgspec.json.decode(msgspec.json.encode(openrpc_document()))
    assert given == DOCUMENT
    assert re.fullmatch("[0-9a-f]{64}", schema_sha256())


def make_docs(
    project_root: Path, *arguments: str, seed: str = "0"
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, project_root / "scripts" / "make_docs.py", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
        timeout=60,
    )


def test_the_committed_documents_are_what_the_code_makes(project_root: Path) -> None:
    """`python scripts/make_docs.py` writes them anew."""
    checked = make_docs(project_root, "--check")
    assert (checked.returncode, checked.stdout) == (0, ""), checked


def test_the_documents_are_the_same_bytes_whatever_the_hash_seed(
    project_root: Path, tmp_path: Path
) -> None:
    for seed in ("1", "2"):
        made = make_docs(project_root, str(tmp_path / seed), seed=seed)
        assert made.returncode == 0, made.stderr
    for name in ("openrpc.json", "docs/protocol.md"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.mark.parametrize("name", ["openrpc.json", "docs/protocol.md"])
def test_a_document_that_differs_is_named_and_left_alone(
    project_root: Path, tmp_path: Path, name: str
) -> None:
    assert make_docs(project_root, str(tmp_path)).returncode == 0
    (tmp_path / name).write_text("old\n")
    checked = make_docs(project_root, "--check", str(tmp_path))
    assert (checked.returncode, checked.stdout) == (1, f"{name} is not what the code makes\n")
    assert (tmp_path / name).read_text() == "old\n"
    (tmp_path / name).unlink()
    assert make_docs(project_root, "--check", str(tmp_path)).returncode == 1


@pytest.fixture(scope="module")
def reference(project_root: Path) -> str:
    return (project_root / "docs" / "protocol.md").read_text("utf-8")


def test_the_reference_has_every_name(reference: str) -> None:
    """Methods, notifications, reasons, codes, settings, limits, scopes, parameters and members."""
    names = {
        *METHODS,
        *(one.name for one in (*NOTIFICATIONS, *CLIENT_NOTIFICATIONS)),
        *(error.reason for error in ERRORS),
        *(str(error.code) for error in ERRORS),
        *(setting.name for setting in settings_fields()),
        *m.Limits.__struct_fields__,
        *SCOPES,
        *(param["name"] for method in METHOD_OBJECTS for param in method["params"]),
        *(name for schema in SCHEMAS.values() for name in schema["properties"]),
    }
    assert {name for name in names if f"`{name}`" not in reference} == set()


def test_every_text_of_an_error_stands_in_the_reference(reference: str) -> None:
    for error in ERRORS:
        assert (inspect.getdoc(error) or "missing") in reference
        assert (error.hint or "") in reference


def test_every_link_of_the_reference_leads_to_a_heading(reference: str) -> None:
    headings = re.findall(r"^#+ (.+)$", reference, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}
    assert len(anchors) == len(headings)
    links = set(re.findall(r"\]\(#([^)]+)\)", reference))
    assert links
    assert links <= anchors
