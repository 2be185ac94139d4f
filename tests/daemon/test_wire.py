"""What a client meets on the socket: frames, JSON and JSON-RPC (PROTOCOL.md §1)."""

import base64
import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.daemon.conftest import Daemon, Gate, Message, Peer, notification, request, user

from recapd.protocol.errors import InvalidParams, MethodNotFound, TooDeep

PING = b'{"jsonrpc":"2.0","id":"ping","method":"protocol.ping"}\n'


def reasons(answers: list[Message]) -> list[str]:
    return [answer["error"]["data"]["reason"] for answer in answers]


async def still_works(peer: Peer) -> None:
    """The connection goes on, and nothing was sent that nobody read."""
    await peer.send(PING)
    assert (await peer.message())["id"] == "ping"


# Ids.


@pytest.mark.parametrize(
    "id",
    [
        b'"a"',
        b'""',
        b"0",
        b"-7",
        b"123456789012345678901234567890",
        rb'"\u0061\/"',
        '"\u2028 \U0001f600"'.encode(),
    ],
)
async def test_an_id_is_given_back_exactly_as_it_was_written(peer: Peer, id: bytes) -> None:
    """PROTOCOL.md §1, "Request id"."""
    await peer.send(b'{"jsonrpc":"2.0","id":%b,"method":"protocol.ping"}\n' % id)
    assert (await peer.frame()).startswith(b'{"jsonrpc":"2.0","id":%b,"result":' % id)


@pytest.mark.parametrize("id", ["null", "1.5", "1.0", "1e3", "true", "[]", "{}", '["a"]'])
async def test_an_id_of_another_kind_is_an_invalid_request(peer: Peer, id: str) -> None:
    """PROTOCOL.md §1, "Request id"; BUGLOG B50: a member `id`, even null, is answered."""
    await peer.send(b'{"jsonrpc":"2.0","id":%b,"method":"protocol.ping"}\n' % id.encode())
    answer = await peer.message()
    assert answer["id"] is None
    assert answer["error"]["code"] == -32600
    await still_works(peer)


async def test_an_id_in_flight_cannot_be_used_again(peer: Peer, gate: Gate) -> None:
    """PROTOCOL.md §1: -32600 `duplicate_request_id`; afterwards it can."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.say(request("same", "session.compact", session_id="a"))
    await gate.reached()
    await peer.say(request("same", "protocol.ping"))
    refused = await peer.message()
    assert (refused["id"], reasons([refused])) == ("same", ["duplicate_request_id"])
    assert refused["error"]["code"] == -32600
    gate.open()
    assert (await peer.message())["result"]["status"] == "completed"
    await peer.say(request("same", "protocol.ping"))
    assert "now" in (await peer.message())["result"]


async def test_a_number_and_a_string_are_different_ids(peer: Peer, gate: Gate) -> None:
    """JSON-RPC 2.0, section 4: 1 and "1" are different values."""
    await peer.call("session.create", session_id="a", items=[user("x")])
    await peer.say(request(1, "session.compact", session_id="a"))
    await gate.reached()
    await peer.say(request("1", "protocol.ping"))
    assert "result" in await peer.answer("1")
    gate.open()
    assert "result" in await peer.answer(1)


# Requests.


@pytest.mark.parametrize(
    "message",
    [
        {"id": 1, "method": "protocol.ping"},
        {"jsonrpc": "1.0", "id": 1, "method": "protocol.ping"},
        {"jsonrpc": 2.0, "id": 1, "method": "protocol.ping"},
        {"jsonrpc": "2.0", "id": 1},
        {"jsonrpc": "2.0", "id": 1, "method": 3},
        {"jsonrpc": "2.0", "id": 1, "method": None},
        {"jsonrpc": "2.0", "id": 1, "result": {}},
        {},
        7,
        "protocol.ping",
        None,
        True,
    ],
)
async def test_json_that_is_no_request_is_an_invalid_request(peer: Peer, message: object) -> None:
    """JSON-RPC 2.0, sections 4 and 5.1."""
    await peer.say(message)
    answer = await peer.message()
    assert (answer["error"]["code"], reasons([answer])) == (-32600, ["invalid_request"])
    assert answer["id"] == (1 if '"id"' in json.dumps(message) else None)
    await still_works(peer)


@pytest.mark.parametrize("method", ["", "ping", "protocol.Ping", "rpc.nothing", "session.search"])
async def test_an_unknown_method_is_not_found(peer: Peer, method: str) -> None:
    """PROTOCOL.md §6; a method that this version does not have is not there either."""
    with pytest.raises(MethodNotFound) as caught:
        await peer.call(method)
    assert caught.value.code == -32601
    await still_works(peer)


@pytest.mark.parametrize("params", [[], ["a"], "a", 3, None, True])
async def test_parameters_that_are_no_object_are_invalid(peer: Peer, params: object) -> None:
    """PROTOCOL.md §1, "Parameters"; BUGLOG B49."""
    await peer.say({"jsonrpc": "2.0", "id": 1, "method": "protocol.ping", "params": params})
    with pytest.raises(InvalidParams) as caught:
        await peer.result(1)
    assert caught.value.data["errors"][0]["path"] == "$.params"
    await still_works(peer)


WRONG: list[tuple[str, Message, str | None]] = [
    ("protocol.ping", {"when": 1}, "$.when"),
    ("session.create", {"title": 3}, "$.title"),
    ("session.create", {"labels": {"a": 1}}, "$.labels[...]"),
    ("session.create", {"session_id": "../x"}, "$.session_id"),
    ("session.create", {"items": {}}, "$.items"),
    ("session.append", {"items": [{}]}, "$.session_id"),
    ("session.append", {"session_id": True, "items": [{}]}, "$.session_id"),
    ("session.append", {"session_id": "a", "items": []}, "$.items"),
    ("session.append", {"session_id": "a"}, "$.items"),
    ("session.append", {"session_id": "a", "items": "x"}, "$.items"),
    ("session.append", {"session_id": "a", "items": [{}], "extra": 1}, "$.extra"),
    (
        "session.append",
        {"session_id": "a", "items": [{}], "operation_id": "a b"},
        "$.operation_id",
    ),
    (
        "session.append",
        {"session_id": "a", "items": [{}], "expected_revision": -1},
        "$.expected_revision",
    ),
    ("session.list", {"limit": -1}, "$.limit"),
    ("session.list", {"limit": 0}, "$.limit"),
    ("session.list", {"sort": "size"}, "$.sort"),
    ("session.list", {"filter": {"colour": "red"}}, "$.filter.colour"),
    ("session.list", {"filter": {"state": "open"}}, "$.filter.state"),
    ("session.get", {"session_id": "a", "order": "up"}, "$.order"),
    ("session.get", {"session_id": "a", "revision": 1.5}, "$.revision"),
    ("session.get", {"session_id": "a", "max_bytes": 0}, "$.max_bytes"),
    ("session.compact", {"session_id": "a", "keep_recent_tokens": "all"}, None),
    ("session.compact", {"session_id": "a", "summarizer": "gpt"}, "$.summarizer"),
    ("session.compact", {"session_id": "a", "wait": 1}, "$.wait"),
    ("session.export", {"session_id": "a", "redact": "all"}, "$.redact"),
    ("session.export", {"session_id": "a", "revision": "first"}, "$.revision"),
    ("session.update", {"session_id": "a", "state": None}, "$.state"),
    ("session.subscribe", {"session_id": "a", "since": "later"}, "$.since"),
    ("session.subscribe", {"session_id": "a", "events": ["moved"]}, "$.events[0]"),
    ("session.subscribe", {"since": 3}, "$.since"),
    ("session.unsubscribe", {}, "$.subscription_id"),
    ("session.events", {"session_id": "a"}, "$.since"),
    ("session.events", {"session_id": "a", "since": 0, "wait_ms": -5}, "$.wait_ms"),
    ("operation.get", {}, "$.operation_id"),
    ("operation.cancel", {"operation_id": ""}, "$.operation_id"),
    ("server.shutdown", {"mode": "fast"}, "$.mode"),
    ("protocol.initialize", {"client": "me"}, "$.client"),
]


@pytest.mark.parametrize(("method", "params", "path"), WRONG)
async def test_a_wrong_parameter_is_named_by_its_path(
    daemon: Daemon, peer: Peer, method: str, params: Message, path: str | None
) -> None:
    """PROTOCOL.md §6, `invalid_params`; BUGLOG B49: others are not affected, nothing is -32603."""
    await peer.call("session.create", session_id="a")
    if method == "protocol.initialize":
        async with daemon.connect() as fresh:
            answer = await fresh.answer(await fresh.ask(method, **params))
    else:
        answer = await peer.answer(await peer.ask(method, **params))
    assert (answer["error"]["code"], reasons([answer])) == (-32602, ["invalid_params"])
    (fault,) = answer["error"]["data"]["errors"]
    assert path in (None, fault["path"])
    assert fault["expected"]
    assert (await peer.call("session.get", session_id="a"))["entries"] == []


async def test_meta_is_always_allowed_and_changes_nothing(peer: Peer) -> None:
    """PROTOCOL.md §1, "Parameters"."""
    await peer.call("session.create", session_id="a", _meta={"trace": [1, {"b": None}]})
    for meta in ({"trace": "t"}, None, "text", 3):
        assert "now" in await peer.call("protocol.ping", _meta=meta)
        assert "entries" in await peer.call("session.get", session_id="a", _meta=meta)


# Batches.


async def test_each_bad_entry_of_a_batch_has_its_own_error(peer: Peer) -> None:
    """JSON-RPC 2.0, section 7: `[1,2,3]` gets three errors."""
    await peer.send(b"[1,2,3]\n")
    answers = await peer.message()
    assert reasons(answers) == ["invalid_request"] * 3
    assert [answer["id"] for answer in answers] == [None] * 3
    await still_works(peer)


async def test_an_empty_batch_is_one_error(peer: Peer) -> None:
    """JSON-RPC 2.0, section 7: a single object, not an array."""
    await peer.send(b"[]\n")
    answer = await peer.message()
    assert (answer["id"], answer["error"]["code"]) == (None, -32600)


async def test_a_batch_of_notifications_is_not_answered(peer: Peer) -> None:
    """JSON-RPC 2.0, section 6: not even with an empty array. They do take effect."""
    await peer.call("session.create", session_id="a")
    append = notification("session.append", session_id="a", items=[user("x")])
    await peer.say([append, notification("nothing.here"), append])
    await still_works(peer)
    assert await peer.items("a") == [user("x"), user("x")]


async def test_a_batch_is_answered_as_in_the_specification(peer: Peer) -> None:
    """JSON-RPC 2.0, section 7, the long example, with methods that are here."""
    await peer.call("session.create", session_id="a")
    await peer.say(
        [
            request("1", "protocol.ping"),
            notification("session.append", session_id="a", items=[user("x")]),
            request("2", "session.get", session_id="a"),
            {"foo": "boo"},
            request("5", "foo.get"),
            request("9", "server.info"),
            request("b", "session.get", session_id="nobody"),
        ]
    )
    answers = await peer.message()
    by_id = {answer["id"]: answer for answer in answers}
    assert sorted(map(str, by_id)) == ["1", "2", "5", "9", "None", "b"]
    assert len(answers) == 6
    assert by_id["2"]["result"]["entries"][0]["item"] == user("x")
    assert reasons([by_id[None], by_id["5"], by_id["b"]]) == [
        "invalid_request",
        "method_not_found",
        "not_found",
    ]


async def test_a_batch_with_one_entry_is_answered_by_an_array(peer: Peer) -> None:
    """JSON-RPC 2.0, section 6."""
    await peer.say([request(1, "protocol.ping")])
    (answer,) = await peer.message()
    assert answer["id"] == 1


async def test_an_id_that_a_batch_has_twice_is_refused_the_second_time(peer: Peer) -> None:
    """PROTOCOL.md §1: it is still in flight; and each entry has its answer."""
    await peer.call("session.create", session_id="a")
    append = request("twice", "session.append", session_id="a", items=[user("x")])
    await peer.say([append, append])
    answers = await peer.message()
    assert [answer["id"] for answer in answers] == ["twice", "twice"]
    assert sorted("result" in answer for answer in answers) == [False, True]
    assert await peer.items("a") == [user("x")]


async def test_a_batch_over_the_limit_is_one_error_and_does_nothing(peer: Peer) -> None:
    """PROTOCOL.md §1, "Limits": batch 128."""
    await peer.call("session.create", session_id="a")
    append = notification("session.append", session_id="a", items=[user("x")])
    await peer.say([append] * 129)
    answer = await peer.message()
    assert (answer["id"], answer["error"]["code"]) == (None, -32600)
    assert answer["error"]["data"]["reason"] == "batch_too_large"
    assert answer["error"]["data"]["limit"] == 128
    assert await peer.items("a") == []
    await peer.say([request(number, "protocol.ping") for number in range(128)])
    assert len(await peer.message()) == 128


async def test_a_batch_inside_a_batch_is_an_invalid_request(peer: Peer) -> None:
    """JSON-RPC 2.0, section 6: an entry is a request object."""
    await peer.say([[request(1, "protocol.ping")], request(2, "protocol.ping")])
    answers = await peer.message()
    assert sorted("error" in answer for answer in answers) == [False, True]


# Notifications.


async def test_a_notification_is_never_answered(peer: Peer) -> None:
    """PROTOCOL.md §1, "Notifications from a client"; BUGLOG B50: not even with an error."""
    await peer.call("session.create", session_id="a")
    await peer.say(
        notification("nothing.here"),
        notification("session.append", session_id="a", items=[user("done")]),
        notification("session.append", session_id="a", items=3),
        notification("session.append", session_id="nobody", items=[user("x")]),
        notification("session.get", session_id="a"),
        {"jsonrpc": "2.0", "method": "protocol.ping", "params": [1]},
        notification("$/cancelRequest", id="nothing"),
        notification("$/cancelRequest", id=[]),
        notification("$/cancelRequest"),
        request("last", "session.get", session_id="a"),
    )
    (answer,) = await peer.rest()
    assert answer["id"] == "last"
    assert [entry["item"] for entry in answer["result"]["entries"]] == [user("done")]


async def test_cancel_request_is_a_notification_only(peer: Peer) -> None:
    """PROTOCOL.md §3: `$/cancelRequest` is no method that could be called."""
    with pytest.raises(MethodNotFound):
        await peer.call("$/cancelRequest", id="x")


# JSON.


@pytest.mark.promise("J1")
@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping"',
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping"}}',
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping",}',
        b"{'jsonrpc':'2.0'}",
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping","params":{"_meta":NaN}}',
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping","params":{"_meta":-Infinity}}',
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping","params":{"_meta":01}}',
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping","params":{"_meta":"\xff\xfe"}}',
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping","params":{"_meta":"\xed\xa0\xbd"}}',
        rb'{"jsonrpc":"2.0","id":1,"method":"protocol.ping","params":{"_meta":"\ud83d"}}',
        rb'{"jsonrpc":"2.0","id":1,"method":"protocol.ping","params":{"_meta":{"\udc00":1}}}',
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping","params":{"_meta":"a\x00b"}}',
        b'{"jsonrpc":"2.0","id":1,"method":"protocol.ping","params":{"_meta":"a\tb"}}',
        b'[{"jsonrpc":"2.0","id":1,"method":"protocol.ping"},',
        b"\xef\xbb\xbf{}",
        b"\x00",
        b"nonsense",
    ],
)
async def test_what_is_not_strict_json_is_a_parse_error_and_the_connection_goes_on(
    peer: Peer, line: bytes
) -> None:
    """PROTOCOL.md §1, "Values"; BUGLOG B44, B47, B48, B55."""
    await peer.send(line + b"\n")
    answer = await peer.message()
    assert (answer["id"], answer["error"]["code"], reasons([answer])) == (
        None,
        -32700,
        ["parse_error"],
    )
    assert line.decode(errors="replace") not in json.dumps(answer)
    await still_works(peer)


async def test_blank_lines_and_carriage_returns_are_tolerated(peer: Peer) -> None:
    """PROTOCOL.md §1, "Framing"; BUGLOG B48."""
    await peer.send(b"\n  \n\t\r\n\r\n" + PING.replace(b"\n", b"\r\n") + b"\n")
    assert (await peer.message())["id"] == "ping"
    spread = b'{"jsonrpc":"2.0",\r"id":"ping",\r\t"method":"protocol.ping"}\n'
    await peer.send(spread)
    assert (await peer.message())["id"] == "ping"
    await still_works(peer)


@pytest.mark.parametrize("framing", ["lines", "content-length"])
async def test_text_never_ends_a_frame(daemon: Daemon, framing: Any) -> None:
    """PROTOCOL.md §1: split on byte 0x0A only; BUGLOG B53: lengths count bytes."""
    texts = [
        "line\u2028separator\u2029paragraph\u0085next\x0bvertical\x0cform\x1cfile",
        "\U0001f469\u200d\U0001f4bb 漢字 \u202eright to left",
        'Content-Length: 5\r\n\r\n{"jsonrpc":"2.0","id":1,"method":"server.shutdown"}',
        '\\n{"jsonrpc":"2.0","id":1,"method":"server.shutdown"}\n\n',
        "\r\r\n\r",
    ]
    async with daemon.connect(framing) as peer:
        await peer.call("session.create", session_id="a")
        for text in texts:
            append = request("raw", "session.append", session_id="a", items=[user(text)])
            body = json.dumps(append, ensure_ascii=False).encode()
            if framing == "content-length":
                body = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            else:
                body += b"\n"
            await peer.send(body)
            assert "result" in await peer.answer("raw")
        assert await peer.items("a") == [user(text) for text in texts]


@pytest.mark.parametrize("framing", ["lines", "content-length"])
async def test_a_frame_may_come_one_byte_at_a_time(daemon: Daemon, framing: Any) -> None:
    """BUGLOG B53: split inside a character, then two requests in one write."""
    text = "é漢\U0001f600"
    first, second = (
        json.dumps(
            request(id, "session.append", session_id="a", items=[user(text)]), ensure_ascii=False
        ).encode()
        for id in ("first", "second")
    )
    async with daemon.connect(framing) as peer:
        await peer.call("session.create", session_id="a")
        frames = [
            b"Content-Length: %d\r\n\r\n%b" % (len(one), one)
            if framing == "content-length"
            else one + b"\n"
            for one in (first, second)
        ]
        for byte in frames[0]:
            await peer.send(bytes((byte,)))
            await anyio.lowlevel.checkpoint()
        assert "result" in await peer.answer("first")
        await peer.send(frames[0].replace(b"first", b"third") + frames[1])
        assert "result" in await peer.answer("third")
        assert "result" in await peer.answer("second")
        assert await peer.items("a") == [user(text)] * 3


async def test_half_a_frame_and_a_close_harm_nobody(daemon: Daemon, peer: Peer) -> None:
    """BUGLOG B48."""
    for half in (
        b'{"jsonrpc":"2.0","id":1,"meth',
        b"C",
        b"Content-Length: 50\r\n\r\n{",
        b"\n",
        b"",
    ):
        async with daemon.connect() as other:
            await other.send(half)
            assert await other.rest() == []
    await still_works(peer)


# Other limits of a frame.


def nested(depth: int) -> bytes:
    """A ping whose frame nests arrays and objects so deep."""
    inner = b"[" * (depth - 2) + b"]" * (depth - 2)
    return b'{"jsonrpc":"2.0","id":"deep","method":"protocol.ping","params":{"_meta":%b}}\n' % inner


async def test_a_frame_may_be_nested_up_to_the_limit(peer: Peer) -> None:
    """PROTOCOL.md §1, "Limits": nesting depth 128."""
    await peer.send(nested(128))
    assert "result" in await peer.answer("deep")
    await peer.send(nested(129))
    with pytest.raises(TooDeep) as caught:
        await peer.result("deep")
    assert (caught.value.code, caught.value.data) == (-32600, {"limit": 128})
    await peer.send(b"[" * 100_000 + b"\n")
    assert reasons([await peer.message()]) == ["too_deep"]
    await still_works(peer)


@pytest.mark.promise("J3")
async def test_a_frame_over_the_limit_is_answered_and_ends_the_connection(
    start: Any,
) -> None:
    """PROTOCOL.md §1; PROMISES.md J3: the stream is closed, not searched for the next frame."""
    limit = 1 << 20
    async with start(frame_bytes_max=limit) as daemon, daemon.connect() as other:
        for end in (b"\n" + PING, b""):
            async with daemon.connect() as peer:
                await still_works(peer)
                await peer.send(b'{"jsonrpc":"2.0","id":1,' + b" " * limit + end)
                (answer,) = await peer.until_closed()
                assert (answer["id"], answer["error"]["code"]) == (None, -32007)
                assert answer["error"]["data"]["limit_bytes"] == limit
        exact = PING.rstrip()[:-1] + b" " * (limit - len(PING) + 1) + b"}\n"
        assert len(exact) == limit + 1
        await other.send(exact)
        assert (await other.message())["id"] == "ping"


@pytest.mark.parametrize("item_bytes", [65_535, 65_536, 65_537, 5_000_000])
async def test_long_lines_are_no_trouble(peer: Peer, item_bytes: int) -> None:
    """BUGLOG B52: lines over 64 KiB ended the connection elsewhere."""
    await peer.call("session.create", session_id="a")
    item = user("")
    item["content"] = "x" * (item_bytes - len(json.dumps(item)))
    await peer.call("session.append", session_id="a", items=[item])
    assert await peer.items("a") == [item]


# Content-Length framing.


async def test_a_client_may_speak_content_length_framing_both_ways(daemon: Daemon) -> None:
    """PROTOCOL.md §1: the first byte is `C`; LSP 3.17, base protocol."""
    async with daemon.connect("content-length") as peer:
        assert (await peer.call("protocol.initialize"))["protocol"] == 1
        await peer.call("session.create", session_id="a")
        await peer.call("session.subscribe", session_id="a")
        body = json.dumps(request("typed", "session.append", session_id="a", items=[user("\n")]))
        await peer.send(
            b"content-type: application/vscode-jsonrpc; charset=utf-8\r\n"
            b"CONTENT-LENGTH:%d\r\n\r\n%b" % (len(body), body.encode())
        )
        assert "result" in await peer.answer("typed")
        assert (await peer.notice())["method"] == "history.appended"
        pretty = json.dumps([request(1, "protocol.ping"), 5], indent=2).encode()
        await peer.send(b"Content-Length: %d\r\n\r\n%b" % (len(pretty), pretty))
        assert len(await peer.message()) == 2


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: five\r\n\r\n",
        b"Content-Length: -5\r\n\r\n",
        b"Content-Length: 5\n\n",
        b"Content-Type: text\r\n\r\n",
        b"C" * 10_000,
        b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    ],
)
async def test_a_bad_header_is_a_parse_error_and_ends_the_connection(
    daemon: Daemon, peer: Peer, header: bytes
) -> None:
    """LSP 3.17, base protocol; where the next frame starts is not known any more."""
    async with daemon.connect("content-length") as other:
        await other.send(header)
        (answer,) = await other.until_closed()
        assert (answer["id"], answer["error"]["code"]) == (None, -32700)
    await still_works(peer)


async def test_a_pretty_printed_item_comes_back_in_one_line(daemon: Daemon, peer: Peer) -> None:
    """methods.py, `session.append`: line breaks between tokens become spaces, the rest is kept."""
    await peer.call("session.create", session_id="a")
    item = b'{\r\n  "role": "user",\n  "content": "a\\nb",\n "n": 1.0}'
    body = (
        b'{"jsonrpc":"2.0","id":1,"method":"session.append","params":{"session_id":"a","items":[%b]}}'
        % item
    )
    async with daemon.connect("content-length") as other:
        await other.send(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        assert "result" in await other.answer(1)
    await peer.send(
        b'{"jsonrpc":"2.0","id":1,"method":"session.get","params":{"session_id":"a"}}\n'
    )
    assert item.replace(b"\n", b" ").replace(b"\r", b" ") in await peer.frame()


# Everything at once.


def parsing_suite(corpus: Path) -> dict[str, bytes]:
    """Texts by name; its first letter says whether they must, must not or may parse."""
    files: dict[str, str] = json.loads(
        (corpus / "27-json-parsing-suite" / "files.base64.json").read_bytes()
    )
    found = {
        name.removeprefix("test_parsing/"): base64.b64decode(text)
        for name, text in files.items()
        if name.startswith("test_parsing/")
    }
    assert len(found) > 300
    return found


@pytest.mark.promise("J1")
async def test_the_json_parsing_suite_never_ends_the_connection(
    daemon: Daemon, corpus: Path
) -> None:
    """BUGLOG, corpus 27: `y_` must parse, `n_` must be refused, `i_` either way."""
    async with daemon.connect("content-length") as peer:
        for name, body in parsing_suite(corpus).items():
            await peer.send(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            await peer.say(request("next", "protocol.ping"))
            answers: list[Message] = []
            while (message := await peer.message()) != {} and (
                isinstance(message, list) or message["id"] != "next"
            ):
                answers += message if isinstance(message, list) else [message]
            assert answers, name
            found = {answer["error"]["data"]["reason"] for answer in answers}
            match name[0]:
                case "y":
                    assert found == {"invalid_request"}, name
                case "n":
                    assert found <= {"parse_error", "too_deep"}, name
                case _:
                    assert found <= {"parse_error", "invalid_request", "too_deep"}, name


async def test_valid_objects_of_the_parsing_suite_come_back_byte_for_byte(
    peer: Peer, corpus: Path
) -> None:
    """DESIGN.md promise 6; BUGLOG B55: escapes, duplicate keys, big numbers."""
    valid = [body for name, body in parsing_suite(corpus).items() if name.startswith("y_")]
    items = [
        body if body.startswith(b"{") else b'{"a":%b}' % body
        for body in (body.strip().replace(b"\n", b" ").replace(b"\r", b" ") for body in valid)
    ]
    await peer.call("session.create", session_id="a")
    await peer.send(
        b'{"jsonrpc":"2.0","id":"in","method":"session.append","params":{"session_id":"a","items":[%b]}}\n'
        % b",".join(items)
    )
    assert "result" in await peer.answer("in")
    await peer.send(
        b'{"jsonrpc":"2.0","id":"out","method":"session.export",'
        b'"params":{"session_id":"a","redact":"none"}}\n'
    )
    exported = (await peer.result("out"))["chunk"].encode()
    assert exported == b"".join(item + b"\n" for item in items)


async def test_unusual_numbers_keys_and_escapes_come_back_as_they_were(peer: Peer) -> None:
    """PROTOCOL.md §1, "Values"; BUGLOG B31, B45, B55."""
    items = [
        rb'{"score":1e999,"zero":-0.0,"big":12345678901234567890123,"one":1.0,"exp":1E+2}',
        rb'{"a":1,"a":2,"b":{"c":1,"c":2}}',
        rb'{"role":"user","content":"a\u0000b"}',
        rb'{"role":"user","content":"a\\u0000b"}',
        rb'{"\u0000key":1,"role":"user"}',
        rb'{"role":"user","content":"\u00e9\/\u2028\ud83d\ude00"}',
        '{"z":null,"a":"é\u2028\U0001f600","role" : "user" }'.encode(),
        b'{"type":"made_up_result","payload":[[],{},null,false]}',
        b"{}",
    ]
    await peer.call("session.create", session_id="a")
    await peer.send(
        b'{"jsonrpc":"2.0","id":"in","method":"session.append","params":{"session_id":"a","items":[%b]}}\n'
        % b",".join(items)
    )
    assert "result" in await peer.answer("in")
    for revision in ("null", "1"):
        await peer.send(
            b'{"jsonrpc":"2.0","id":"out","method":"session.get","params":'
            b'{"session_id":"a","revision":%b}}\n' % revision.encode()
        )
        frame = await peer.frame()
        for item in items:
            assert b'"item":%b}' % item in frame
        if revision == "null":
            await peer.call("session.compact", session_id="a")
