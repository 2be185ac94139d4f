"""The OpenRPC document (spec.open-rpc.org, 1.3), made from the tables of methods and errors.

OpenRPC tells the errors of a method apart by their codes; clients of recapd switch on the reason,
and a code may have several. So `errors` of a method refers to one reason of each code, and its
`x-reasons` names all. `x-common-reasons` may come from any request, and are not repeated.
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from functools import cache
from types import NoneType
from typing import Annotated, Any, Final, Union, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from recapd.protocol.errors import ERRORS, RpcError
from recapd.protocol.examples import EXAMPLES
from recapd.protocol.messages import PROTOCOL_VERSION, DiscoverResult, MutationParams, Params
from recapd.protocol.methods import (
    CLIENT_NOTIFICATIONS,
    COMMON_ERRORS,
    METHODS,
    NOTIFICATIONS,
    Method,
    Notification,
)

Json = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_OF_ANY_CHANGE: Final = frozenset(MutationParams.__struct_fields__)

_encode = msgspec.json.Encoder().encode


@cache
def openrpc_document() -> DiscoverResult:
    """The document that `rpc.discover` gives to everybody."""
    params = [
        *(method.params for method in METHODS.values()),
        *(notification.params for notification in CLIENT_NOTIFICATIONS),
    ]
    others = [
        *(method.result for method in METHODS.values()),
        *(notification.params for notification in NOTIFICATIONS),
    ]
    data = {error.reason: _data_type(error) for error in ERRORS}
    schemas = _schemas([*params, *others, *data.values()])
    # What a method takes stands in the method itself.
    schema_of = {one.__name__: schemas.pop(one.__name__) for one in dict.fromkeys(params)}
    return DiscoverResult(
        openrpc="1.3.2",
        info={
            "title": "recapd",
            "version": str(PROTOCOL_VERSION),
            "description": "Sessions of AI agents: append, read, compact, archive."
            " JSON-RPC 2.0 over a Unix socket.",
            "license": {"name": "MIT"},
        },
        methods=[_method(method, schema_of) for method in METHODS.values()],
        notifications=[{**_head(one), "params": _ref(one.params)} for one in NOTIFICATIONS],
        client_notifications=[
            {**_head(one), "params": _descriptors(schema_of[one.params.__name__])}
            for one in CLIENT_NOTIFICATIONS
        ],
        common_reasons=[error.reason for error in COMMON_ERRORS],
        reasons={
            error.reason: {
                "description": inspect.getdoc(error),
                "data": _ref(data[error.reason]),
            }
            for error in ERRORS
        },
        components={
            "schemas": schemas,
            "errors": {error.reason: _error(error) for error in ERRORS},
        },
    )


@cache
def openrpc_json() -> bytes:
    """The document as it is committed: `openrpc.json`."""
    return msgspec.json.format(_encode(openrpc_document()), indent=2) + b"\n"


@cache
def schema_sha256() -> str:
    """Tells a client whether it knows this very protocol: the hash of the committed document."""
    return hashlib.sha256(openrpc_json()).hexdigest()


def _method(method: Method, schema_of: Mapping[str, Json]) -> Json:
    schema = schema_of[method.params.__name__]
    params = _descriptors(schema)
    by_code = {error.code: error for error in reversed(method.errors)}
    return {
        **_head(method),
        **({} if method.params is Params else {"description": schema["description"]}),
        "paramStructure": "by-name",
        "params": params,
        "result": {
            "name": "result",
            "description": inspect.getdoc(method.result),
            "schema": _ref(method.result),
        },
        "errors": [
            {"$ref": f"#/components/errors/{error.reason}"}
            for error in method.errors
            if by_code[error.code] is error
        ],
        "examples": [_example(method.name, [param["name"] for param in params])],
        "x-reasons": [error.reason for error in method.errors],
        **({"x-scope": method.scope} if method.scope else {}),
    }


def _head(row: Method | Notification) -> Json:
    return {"name": row.name, "summary": row.summary}


def _ref(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def _descriptors(schema: Json) -> list[Json]:
    """The parameters: those that are required, as OpenRPC asks, before the others."""
    required = schema["required"]
    members = [(name, member) for name, member in schema["properties"].items() if name != "_meta"]
    members.sort(key=lambda member: (member[0] not in required, member[0] in _OF_ANY_CHANGE))
    return [
        {"name": name, **_description(member), "required": name in required, "schema": member}
        for name, member in members
    ]


def _description(schema: Json) -> Json:
    """What the types of a parameter say of it."""
    said = [
        option["description"]
        for option in (schema, *schema.get("anyOf", ()))
        if "description" in option
    ]
    return {"description": "; ".join(said)} if said else {}


def _error(error: type[RpcError]) -> Json:
    data: Json = {"reason": error.reason, "retryable": error.retryable}
    if error.hint is not None:
        data["hint"] = error.hint
    return {"code": error.code, "message": error.text, "data": data}


def _example(method: str, order: Sequence[str]) -> Json:
    params, result = EXAMPLES[method]
    given = _plain(_given(params))
    return {
        "name": method,
        "params": [{"name": name, "value": given[name]} for name in order if name in given],
        "result": {"name": "result", "value": _plain(result)},
    }


def _given(value: Any) -> Any:
    """A structure without the members that are at their default, as a client would send it."""
    if not isinstance(value, msgspec.Struct):
        return value
    return {
        field.encode_name: _given(getattr(value, field.name))
        for field in msgspec.structs.fields(value)
        if getattr(value, field.name) != _default(field)
    }


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def _plain(value: object) -> Any:
    return msgspec.json.decode(_encode(value))


# Types to JSON Schema.


def _schemas(kinds: Sequence[type[msgspec.Struct]]) -> dict[str, Json]:
    """The schemas of these structures, and of all that they are made of, by name."""
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    for kind in kinds:
        schema = schemas[kind.__name__]
        for field in msgspec.structs.fields(kind):
            options = get_args(field.type)
            if UnsetType in options and field.encode_name in schema["required"]:
                schema["required"].remove(field.encode_name)
            if Raw in options:
                # What was encoded before stands in place of the other, and looks the same.
                (schema["properties"][field.encode_name],) = (
                    option for option in schema["properties"][field.encode_name]["anyOf"] if option
                )
    return schemas


def _data_type(error: type[RpcError]) -> type[msgspec.Struct]:
    """What `data` holds in an error of this reason, by the arguments that its class takes."""
    members: dict[str, Any] = {
        "reason": Annotated[str, Meta(extra_json_schema={"const": error.reason})],
        "retryable": bool,
        "hint": str | None,
    }
    for name, kind in get_type_hints(error.__init__).items():
        if name not in ("data", "return"):
            members.setdefault(name, kind)
    return msgspec.defstruct(
        f"{error.__name__}Data",
        [
            # None is left out.
            (name, _without_none(kind), UNSET) if NoneType in get_args(kind) else (name, kind)
            for name, kind in members.items()
        ],
        kw_only=True,
        namespace={"__doc__": inspect.getdoc(error)},
    )


def _without_none(kind: Any) -> Any:
    return Union[(*(one for one in get_args(kind) if one is not NoneType), UnsetType)]
