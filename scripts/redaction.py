"""What the redaction of secrets misses, what it takes for one, and how fast it is.

    scripts/bench redaction [--json] [--no-corpus]

Misses: secrets of many shapes are made here, at random and none of them real, and put into five
surroundings: in a sentence; in JSON within a string of JSON; in the query of a URL; as a variable
of an environment file; and broken in two by a line end, as a terminal does. One is missed when
half of its random part is still there.

False hits: every text of the corpus, where it lies beside the project, and of the histories in
tests/data/histories. All keys of the corpus were replaced when it was made, so what is found there
is no secret. It is shown by its kind only.

Speed: over the same items, in MB of JSON text a second.

Last figures: of 52 shapes 4 are missed in a URL (what is escaped there), none in a sentence, in
JSON or in a file, and 51 where a line end breaks them; no false hit in 12.6 MB.
"""

import argparse
import base64
import json
import random
import string
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from scripts.histories import hand_made

from recapd.daemon.redaction import Redactor
from recapd.protocol.items import is_array, is_object

ROOT: Final = Path(__file__).resolve().parent.parent
CORPUS: Final = ROOT.parent / "shared" / "corpus"

WORD: Final = string.ascii_letters + string.digits
URL_SAFE: Final = WORD + "_-"
HEX: Final = "0123456789abcdef"
UPPER: Final = string.ascii_uppercase + string.digits

Make = Callable[[random.Random], tuple[str, str]]
"""A secret, and the part of it that must not be seen."""


def of(alphabet: str, length: int, before: str = "", after: str = "") -> Make:
    def make(chance: random.Random) -> tuple[str, str]:
        ending = "7f2" if alphabet == HEX else "A1Z" if alphabet == UPPER else "a1Z"
        part = "".join(chance.choices(alphabet, k=length - len(ending))) + ending
        return before + part + after, part

    return make


def a_private_key(chance: random.Random) -> tuple[str, str]:
    part = base64.b64encode(chance.randbytes(600)).decode()
    lines = "\n".join(part[at : at + 64] for at in range(0, len(part), 64))
    edge = "-----{} RSA PRIVATE KEY-----"
    return f"{edge.format('BEGIN')}\n{lines}\n{edge.format('END')}", part[64:128]


def a_jwt(chance: random.Random) -> tuple[str, str]:
    def encoded(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    _, part = of(URL_SAFE, 43)(chance)
    return f"{encoded({'alg': 'HS256', 'typ': 'JWT'})}.{encoded({'sub': 'somebody'})}.{part}", part


def a_basic_credential(chance: random.Random) -> tuple[str, str]:
    _, password = of(WORD, 18)(chance)
    part = base64.b64encode(f"user:{password}".encode()).decode()
    return f"Authorization: Basic {part}", part


SHAPES: Final[dict[str, Make]] = {
    "private key": a_private_key,
    "age key": of(UPPER, 58, "AGE-SECRET-KEY-1"),
    "anthropic": of(URL_SAFE, 90, "sk-ant-api03-"),
    "openai": of(WORD, 48, "sk-"),
    "openai project": of(URL_SAFE, 120, "sk-proj-"),
    "openrouter": of(HEX, 64, "sk-or-v1-"),
    "github": of(WORD, 36, "ghp_"),
    "github app": of(WORD, 36, "ghs_"),
    "github fine": of(WORD, 80, "github_pat_"),
    "gitlab": of(URL_SAFE, 20, "glpat-"),
    "gitlab runner": of(URL_SAFE, 20, "glrt-"),
    "aws key id": of(UPPER, 16, "AKIA"),
    "aws secret": of(WORD + "+/", 40, "AWS_SECRET_ACCESS_KEY="),
    "google api": of(URL_SAFE, 35, "AIza"),
    "google oauth": of(URL_SAFE, 100, "ya29."),
    "google client": of(URL_SAFE, 28, "GOCSPX-"),
    "slack bot": of(WORD, 24, "xoxb-123456789012-"),
    "slack app": of(WORD, 40, "xapp-1-A0-1-"),
    "slack webhook": of(WORD, 24, "https://hooks.slack.com/services/T0A1B2C3D/B0A1B2C3D/"),
    "discord webhook": of(URL_SAFE, 68, "https://discord.com/api/webhooks/123456789012345678/"),
    "telegram": of(URL_SAFE, 33, "1234567890:AA"),
    "stripe": of(WORD, 24, "sk_live_"),
    "stripe webhook": of(WORD, 32, "whsec_"),
    "sendgrid": of(URL_SAFE, 43, "SG.abcdefghijklmnopqrstuv."),
    "twilio": of(HEX, 32, "SK"),
    "npm": of(WORD, 36, "npm_"),
    "pypi": of(URL_SAFE, 150, "pypi-"),
    "hugging face": of(WORD, 34, "hf_"),
    "groq": of(WORD, 52, "gsk_"),
    "xai": of(WORD, 80, "xai-"),
    "perplexity": of(WORD, 48, "pplx-"),
    "replicate": of(WORD, 37, "r8_"),
    "digitalocean": of(HEX, 64, "dop_v1_"),
    "shopify": of(HEX, 32, "shpat_"),
    "databricks": of(HEX, 32, "dapi"),
    "vault": of(URL_SAFE, 24, "hvs."),
    "linear": of(WORD, 40, "lin_api_"),
    "notion": of(WORD, 46, "ntn_"),
    "supabase": of(HEX, 40, "sbp_"),
    "grafana": of(WORD, 32, "glsa_", "_0123abcd"),
    "docker hub": of(URL_SAFE, 27, "dckr_pat_"),
    "rubygems": of(HEX, 48, "rubygems_"),
    "new relic": of(UPPER, 27, "NRAK-"),
    "postman": of(HEX, 34, "PMAK-0123456789abcdef01234567-"),
    "atlassian": of(URL_SAFE, 180, "ATATT3"),
    "azure storage": of(WORD + "+/", 86, "AccountName=a;AccountKey=", "=="),
    "recapd": of(URL_SAFE, 43, "recapd_"),
    "jwt": a_jwt,
    "bearer": of(URL_SAFE, 40, "Authorization: Bearer "),
    "basic": a_basic_credential,
    "password in url": of(WORD, 20, "postgres://user:", "@db.example.com/x"),
    "assigned": of(WORD, 24, "client_secret="),
}

SURROUNDINGS: Final[dict[str, Callable[[str], str]]] = {
    "sentence": lambda secret: f"it is {secret}, keep it to yourself",
    "json": lambda secret: json.dumps({"arguments": json.dumps({"key": secret})}),
    "url": lambda secret: (
        f"https://example.com/v1?key={urllib.parse.quote(secret, safe='/:=+')}&x=1"
    ),
    "env": lambda secret: f'export SETTING="{secret}"\nexport OTHER=1\n',
    "broken": lambda secret: f"{secret[: len(secret) // 2]}\n{secret[len(secret) // 2 :]}",
}


def seen(part: str, text: str) -> bool:
    """Whether any half of it is there, line ends and JSON's escapes of them aside."""
    text = text.replace("\\\\n", "").replace("\\n", "").replace("\n", "")
    half = len(part) // 2
    return part[:half] in text or part[half:] in text


def misses() -> dict[str, dict[str, bool]]:
    """By shape and surrounding, whether it was missed."""
    chance = random.Random(4)  # the same ones each time
    found: dict[str, dict[str, bool]] = {}
    for shape, make in SHAPES.items():
        found[shape] = {}
        for surrounding, put in SURROUNDINGS.items():
            secret, part = make(chance)
            item = json.dumps({"role": "user", "content": put(secret)}).encode()
            said: str = json.loads(Redactor().item(item))["content"]
            found[shape][surrounding] = seen(part, said)
    return found


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif is_object(value) or is_array(value):
        for member in value.values() if is_object(value) else value:
            yield from texts(member)


def documents(corpus: bool) -> Iterator[tuple[str, bytes]]:
    """Name and JSON text of everything that false hits are looked for in."""
    for name, items in hand_made(ROOT / "tests" / "data" / "histories"):
        for item in items:
            yield name, json.dumps(item).encode()
    for path in sorted(CORPUS.rglob("*")) if corpus else ():
        name = str(path.relative_to(CORPUS))
        if not path.is_file() or path.name == "INDEX.md":
            continue
        content = path.read_text("utf-8")
        pieces = content.splitlines() if path.suffix == ".jsonl" else [content]
        for piece in pieces:
            try:
                yield name, json.dumps(json.loads(piece)).encode()
            except ValueError:
                yield name, json.dumps([piece]).encode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-corpus", action="store_true")
    options = parser.parse_args()
    missed = misses()
    hits: Counter[tuple[str, str]] = Counter()
    size_bytes, spent_s = 0, 0.0
    for name, document in documents(not options.no_corpus):
        redactor = Redactor()
        begun_s = time.perf_counter()
        redactor.item(document)
        spent_s += time.perf_counter() - begun_s
        size_bytes += len(document)
        for kind, count in redactor.counts.items():
            hits[name, kind] += count
    by_surrounding = {
        surrounding: sum(row[surrounding] for row in missed.values())
        for surrounding in SURROUNDINGS
    }
    report = {
        "shapes": len(SHAPES),
        "misses": by_surrounding,
        "false_hits": [
            {"where": name, "kind": kind, "count": count}
            for (name, kind), count in sorted(hits.items())
        ],
        "megabytes": round(size_bytes / 1e6, 1),
        "megabytes_per_s": round(size_bytes / 1e6 / spent_s, 1),
    }
    if options.json:
        json.dump({"redaction": report}, sys.stdout)
        print()
        return
    print(f"{'SHAPE':<18}{''.join(f'{name:<10}' for name in SURROUNDINGS)}")
    for shape, row in missed.items():
        cells = ("MISSED" if gone else "-" for gone in row.values())
        print(f"{shape:<18}{''.join(f'{cell:<10}' for cell in cells)}")
    print(f"{'missed':<18}{''.join(f'{count:<10}' for count in by_surrounding.values())}")
    print()
    for (name, kind), count in sorted(hits.items()):
        print(f"false hit: {count} {kind} in {name}")
    print(
        f"{hits.total()} false hits in {report['megabytes']} MB, {report['megabytes_per_s']} MB/s"
    )


if __name__ == "__main__":
    main()
