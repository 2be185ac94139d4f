"""Write openrpc.json and docs/protocol.md anew, from the code and `protocol.in.md`; and into
docs/durability.md the tests of each promise, from their marks.

    python scripts/make_docs.py [--check] [FOLDER]

FOLDER is where they lie; without it, this project. With `--check` nothing is written: each file
that is not what the code makes is named, and then the exit code is 1.
"""

import argparse
import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from recapd.daemon.compaction.summarise.http import ATTEMPTS_MAX
from recapd.daemon.compaction.summarise.settings import OnlineSettings
from recapd.daemon.config import Settings, settings_fields
from recapd.protocol import errors
from recapd.protocol.messages import Limits
from recapd.protocol.methods import SCOPES
from recapd.protocol.schema import openrpc_json

PROJECT: Final = Path(__file__).resolve().parent.parent
TEMPLATE: Final = Path(__file__).with_name("protocol.in.md")

ERROR_OF_LIMIT: Final[dict[str, type[errors.RpcError]]] = {
    "frame_bytes": errors.FrameTooLarge,
    "batch": errors.BatchTooLarge,
    "in_flight": errors.Overloaded,
    "depth": errors.TooDeep,
    "connections": errors.Overloaded,
    "subscriptions": errors.Overloaded,
    "items_per_append": errors.InvalidParams,
    "item_bytes": errors.ItemTooLarge,
}

NO_BOUND: Final = 2**40  # of a setting

EVENT: Final = "#/components/schemas/Event"

Json = dict[str, Any]


def reference(document: Json, template: str) -> str:
    """The page; every `{{block}}` of the template is one of those made here."""
    schemas: dict[str, Json] = document["components"]["schemas"]
    methods: list[Json] = document["methods"]
    blocks: dict[str, str] = {
        "version": document["info"]["version"],
        "objects": objects(document),
        "index": index(methods),
        "common": names(document["x-common-reasons"]),
        "methods": "\n\n".join(describe_method(method, schemas) for method in methods),
        "notification_index": index(document["x-notifications"]),
        "notifications": "\n\n".join(
            describe_notification(one, schemas) for one in document["x-notifications"]
        ),
        "client_notifications": "\n\n".join(
            f"### {one['name']}\n\n{one['summary']}\n\n{parameters(one['params'])}"
            for one in document["x-client-notifications"]
        ),
        "errors": error_table(document),
        "scopes": names(SCOPES),
        "limits": limits_table(),
        "settings": settings_table(),
        "summarizers": summarizers_table(),
        "attempts": str(ATTEMPTS_MAX),
    }
    used: set[str] = set()

    def fill(block: re.Match[str]) -> str:
        used.add(block[1])
        return blocks[block[1]]

    page = re.sub(r"\{\{(\w+)\}\}", fill, template)
    unused = blocks.keys() - used
    if unused:
        raise SystemExit(f"{TEMPLATE.name} has no place for {', '.join(sorted(unused))}")
    return page


# Blocks.


def index(rows: Iterable[Json]) -> str:
    """Links to the headings of methods or notifications."""
    return "\n".join(
        f"- [`{row['name']}`](#{anchor(row['name'])}): {sentence(row['summary'])}" for row in rows
    )


def objects(document: Json) -> str:
    """What is part of something else: all but results, parameters of notifications, and errors."""
    elsewhere = {
        schema["$ref"]
        for schema in (
            *(method["result"]["schema"] for method in document["methods"]),
            *(one["params"] for one in document["x-notifications"]),
            *(one["data"] for one in document["x-reasons"].values()),
        )
    } - {EVENT}
    return "\n\n".join(
        f"### {name} (object)\n\n{schema['description']}\n\n{members(schema)}"
        for name, schema in document["components"]["schemas"].items()
        if f"#/components/schemas/{name}" not in elsewhere
    )


def describe_notification(notification: Json, schemas: Mapping[str, Json]) -> str:
    """The members of an event stand in one place, and here are those beyond them."""
    event = schema_of({"$ref": EVENT}, schemas)
    schema = schema_of(notification["params"], schemas)
    parts = [f"### {notification['name']}", notification["summary"]]
    if schema is not event:
        parts[1] += f" {schema['description']}"
    if event["properties"].keys() <= schema["properties"].keys():
        parts[1] += f" Carries what every {type_text({'$ref': EVENT})} does"
        parts[1] += "." if schema is event else ", and:"
        own = {
            name: member
            for name, member in schema["properties"].items()
            if name not in event["properties"]
        }
        schema = {**schema, "properties": own}
    if schema["properties"]:
        parts.append(members(schema))
    return "\n\n".join(parts)


def describe_method(method: Json, schemas: Mapping[str, Json]) -> str:
    result = method["result"]
    scope = method.get("x-scope")
    needs = f"Needs the scope `{scope}`." if scope else "Needs no scope."
    parts = [f"### {method['name']}", f"{method['summary']} {needs}"]
    if method["params"]:
        parts += [f"**Parameters.** {method['description']}", parameters(method["params"])]
    else:
        parts.append("**Parameters.** None.")
    parts += [
        f"**Result.** {result['description']}",
        members(schema_of(result["schema"], schemas)),
    ]
    if method["x-reasons"]:
        parts.append(f"**Errors.** {names(method['x-reasons'])}.")
    (example,) = method["examples"]
    parts.append(f"```json\n{wire_form(example)}\n```")
    return "\n\n".join(parts)


def wire_form(example: Json) -> str:
    """The example as two frames, request and answer."""
    request = {"jsonrpc": "2.0", "id": 1, "method": example["name"]}
    params = {param["name"]: param["value"] for param in example["params"]}
    answer = {"jsonrpc": "2.0", "id": 1, "result": example["result"]["value"]}
    frames = (request | ({"params": params} if params else {}), answer)
    return "\n".join(json.dumps(frame, ensure_ascii=False) for frame in frames)


def parameters(descriptors: Sequence[Json]) -> str:
    return table(
        ("Name", "Type", "Default", ""),
        (
            (
                f"`{one['name']}`",
                type_text(one["schema"]),
                "required" if one["required"] else default_text(one["schema"]),
                one.get("description", ""),
            )
            for one in descriptors
        ),
    )


def members(schema: Json) -> str:
    return table(
        ("Member", "Type", ""),
        (
            (
                f"`{name}`",
                type_text(member),
                "; ".join(([] if name in schema["required"] else ["may be absent"]) + said(member)),
            )
            for name, member in schema["properties"].items()
        ),
    )


def error_table(document: Json) -> str:
    schemas = document["components"]["schemas"]
    rows: list[tuple[str, ...]] = []
    for reason, error in document["components"]["errors"].items():
        about = document["x-reasons"][reason]
        data = schema_of(about["data"], schemas)["properties"]
        own = {name: schema for name, schema in data.items() if name not in error["data"]}
        own.pop("hint", None)
        told = [f"`{name}`: {type_text(schema)}" for name, schema in own.items()]
        hint = error["data"].get("hint")
        rows.append(
            (
                f"`{error['code']}`",
                f"`{reason}`",
                "yes" if error["data"]["retryable"] else "no",
                f"{about['description']} *{hint}*" if hint else about["description"],
                ", ".join(told),
            )
        )
    return table(("Code", "Reason", "Retryable", "Meaning and *hint*", "Further data"), rows)


def limits_table() -> str:
    settings = Settings()
    names_of_settings = {field.name for field in settings_fields()}
    return table(
        ("Limit", "Setting", "Default", "Beyond it"),
        (
            (
                f"`{limit}`",
                f"`{limit}_max`" if f"{limit}_max" in names_of_settings else "follows from others",
                str(getattr(settings, f"{limit}_max")),
                f"`{ERROR_OF_LIMIT[limit].reason}`",
            )
            for limit in Limits.__struct_fields__
        ),
    )


def settings_table() -> str:
    kinds = get_type_hints(Settings)
    rows: list[tuple[str, ...]] = []
    for field in settings_fields():
        kind = kinds[field.name]
        flag = field.name.replace("_", "-")
        values = "path"
        if kind is int:
            least, most = field.metadata["least"], field.metadata["most"]
            values = f"at least {least}" + (f", at most {most}" if most < NO_BOUND else "")
        elif kind is bool:
            values = "`true` or `false`"
        elif get_origin(kind) is Literal:
            values = " or ".join(f"`{value}`" for value in get_args(kind))
        rows.append(
            (
                f"`{field.name}`",
                f"`--{flag}`, `--no-{flag}`" if kind is bool else f"`--{flag}`",
                values,
                "" if field.default is None else f"`{str(field.default).lower()}`",
                field.metadata["text"],
            )
        )
    return table(("Setting", "Flag", "Values", "Default", ""), rows)


def summarizers_table() -> str:
    return table(
        ("Member", "Default", ""),
        (
            (
                f"`{field.name}`",
                f"`{str(field.default).lower()}`" if field.default else "",
                field.metadata["text"],
            )
            for field in fields(OnlineSettings)
            if field.name != "kind"
        ),
    )


# Words.


def type_text(schema: Json) -> str:
    """A JSON Schema in a few words."""
    match schema:
        case {"$ref": str(path)}:
            name = path.rpartition("/")[2]
            return f"[{name}](#{anchor(f'{name} (object)')})"
        case {"anyOf": options}:
            return " or ".join(map(type_text, options))
        case {"enum": values}:
            return " or ".join(f'`"{value}"`' for value in values)
        case {"type": "array", "items": items}:
            least = f" (at least {schema['minItems']})" if "minItems" in schema else ""
            return f"array of {type_text(items)}{least}"
        case {"type": "object", "additionalProperties": values}:
            most = f", at most {schema['maxProperties']}" if "maxProperties" in schema else ""
            return f"object of {type_text(values)}{most}"
        case {"type": "integer", "minimum": least, "maximum": most}:
            return f"integer ({least} to {most})"
        case {"type": "integer", "minimum": least}:
            return f"integer (at least {least})"
        case {"type": "string", "maxLength": most}:
            return f"string (at most {most} characters)"
        case {"type": kind}:
            return str(kind)
        case _:
            return "anything"


def default_text(schema: Json) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else "absent"


def said(schema: Json) -> list[str]:
    """What a type says of itself."""
    options = (schema, *schema.get("anyOf", ()))
    return [option["description"] for option in options if "description" in option]


def names(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def sentence(text: str) -> str:
    """The first one, to stand in a line of its own."""
    return re.split(r"(?<=[.;]) ", text, maxsplit=1)[0].rstrip(".;") + "."


def anchor(heading: str) -> str:
    """The fragment by which a heading is linked to."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def schema_of(reference: Json, schemas: Mapping[str, Json]) -> Json:
    return schemas[reference["$ref"].rpartition("/")[2]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


PROMISE: Final = re.compile(r"^(\| ([A-Z]\d+) \| .+? \|)[^|]*\|$", re.M)
"""A row of docs/durability.md: an id, a sentence, and the tests that prove it."""


def promises(page: str, folder: Path) -> str:
    """The page, with the files of tests that carry each promise's mark."""
    found: dict[str, set[str]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            match node:
                case ast.Call(func=ast.Attribute(attr="promise"), args=ids):
                    name = path.relative_to(folder).as_posix()
                    for id in ids:
                        found.setdefault(ast.literal_eval(id), set()).add(name)
                case _:
                    pass
    unknown = found.keys() - {id for _, id in PROMISE.findall(page)}
    if unknown:
        raise ValueError(f"marked and not promised: {unknown}")

    def fill(row: re.Match[str]) -> str:
        return f"{row[1]} {', '.join(f'`{name}`' for name in sorted(found.get(row[2], ())))} |"

    return PROMISE.sub(fill, page)


def main() -> None:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("\n\n")[1].strip())
    parser.add_argument("--check", action="store_true")
    parser.add_argument("folder", type=Path, nargs="?", default=PROJECT)
    arguments = parser.parse_args()
    page = reference(msgspec.json.decode(openrpc_json()), TEMPLATE.read_text("utf-8"))
    durability = (PROJECT / "docs/durability.md").read_text("utf-8")
    made = {
        "openrpc.json": openrpc_json(),
        "docs/protocol.md": page.encode(),
        "docs/durability.md": promises(durability, PROJECT / "tests").encode(),
    }
    old = 0
    for name, content in made.items():
        path: Path = arguments.folder / name
        if path.is_file() and path.read_bytes() == content:
            continue
        old += 1
        if arguments.check:
            print(f"{name} is not what the code makes")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if arguments.check and old:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
