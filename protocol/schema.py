"""The OpenRPC document (spec.open-rpc.org 1.3), made from the table of methods."""

import hashlib
from functools import cache
from typing import Any, Final

import msgspec

from recapd.protocol.errors import ERRORS
from recapd.protocol.messages import PROTOCOL_VERSION, Params
from recapd.protocol.methods import METHODS, NOTIFICATIONS, Method

_REF: Final = "#/components/schemas/{name}"

_encode = msgspec.json.Encoder().encode


@cache
def openrpc_document() -> dict[str, Any]:
    """The document that `rpc.discover` gives to everybody. JSON types only."""
    methods = list(METHODS.values())
    types = [
        *(method.params for method in methods),
        *(method.result for method in methods if method.result is not msgspec.Struct),
        *(notification.params for notification in NOTIFICATIONS),
    ]
    references, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    reference_of = dict(zip(types, references, strict=True))
    for schema in schemas.values():
        # The base class's own text would stand at every structure that has none.
        if schema.get("description") == Params.__doc__:
            del schema["description"]
    return {
        "openrpc": "1.3.2",
        "info": {
            "title": "recapd",
            "version": str(PROTOCOL_VERSION),
            "description": "Sessions of AI agents: append, read, compact, archive. JSON-RPC 2.0 over a Unix socket.",
        },
        "methods": [_method(method, reference_of, schemas) for method in methods],
        "x-notifications": [
            {
                "name": notification.name,
                "summary": notification.summary,
                "params": reference_of[notification.params],
            }
            for notification in NOTIFICATIONS
        ],
        "components": {
            "schemas": schemas,
            "errors": {
                error.reason: {"code": error.code, "message": error.text} for error in ERRORS
            },
        },
    }


def _method(
    method: Method, reference_of: dict[Any, dict[str, Any]], schemas: dict[str, Any]
) -> dict[str, Any]:
    schema = schemas[method.params.__name__]
    required = schema.get("required", ())
    result = reference_of.get(method.result, {"type": "object"})
    return {
        "name": method.name,
        "summary": method.summary,
        "paramStructure": "by-name",
        "params": [
            {"name": name, "required": name in required, "schema": member}
            for name, member in schema["properties"].items()
            if name != "_meta"
        ],
        "result": {"name": "result", "schema": result},
        "errors": [{"$ref": f"#/components/errors/{error.reason}"} for error in method.errors],
        **({"x-scope": method.scope} if method.scope else {}),
    }


@cache
def openrpc_json() -> bytes:
    """The document as it is committed: `openrpc.json`."""
    return msgspec.json.format(_encode(openrpc_document()), indent=2) + b"\n"


@cache
def schema_sha256() -> str:
    """Tells a client whether it knows this very protocol: the hash of the committed document."""
    return hashlib.sha256(openrpc_json()).hexdigest()
