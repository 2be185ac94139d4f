"""What recapd reads from an item: PROTOCOL.md §2 and §5.1."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapd.protocol.errors import InvalidItem
from recapd.protocol.items import ItemFacts, Role, first_text, item_facts, one_line

REMINDER = "<system-reminder>Keep the tests green.</system-reminder>"
DIGITS = "1" * 5_000
"""Of an integer that Python by default does not take (`sys.get_int_max_str_digits`)."""


def facts_of(**members: Any) -> ItemFacts:
    return item_facts(json.dumps(members).encode())


def role_of(**members: Any) -> Role:
    return facts_of(**members).role


# Messages.


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("kind", [{"type": "message"}, {"type": None}, {}])
def test_a_system_or_developer_message_is_an_instruction(
    role: str, kind: dict[str, object]
) -> None:
    """The Responses API takes a message without its type, too."""
    facts = facts_of(**kind, role=role, content="Be brief.")
    assert facts == ItemFacts(Role.INSTRUCTION, "message")


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_text_of_an_instruction_does_not_make_it_a_reminder(role: str) -> None:
    assert role_of(role=role, content=REMINDER) is Role.INSTRUCTION


def test_only_a_message_can_be_an_instruction() -> None:
    """`additional_tools` has the role `developer`, but instructs nobody."""
    facts = facts_of(type="additional_tools", role="developer", tools=[])
    assert facts == ItemFacts(Role.OTHER, "additional_tools")


@pytest.mark.parametrize(
    "content",
    [
        "Why does the build fail?",
        [{"type": "input_text", "text": "Why does the build fail?"}],
        [],
        None,
        "",
    ],
)
def test_a_message_of_the_user_is_the_user_s(content: object) -> None:
    assert facts_of(role="user", content=content) == ItemFacts(Role.USER, "message")


def test_a_message_needs_no_content() -> None:
    assert role_of(role="user") is Role.USER


@pytest.mark.parametrize("role", ["assistant", "tool", "critic", "System", "", None, 1, ["user"]])
def test_a_message_of_any_other_role_is_ordinary(role: object) -> None:
    facts = facts_of(type="message", role=role, content=REMINDER)
    assert facts == ItemFacts(Role.OTHER, "message")


@pytest.mark.parametrize("role", [None, 5, {"a": "user"}])
def test_without_type_and_role_an_item_is_of_no_type(role: object) -> None:
    assert facts_of(role=role, content=REMINDER) == ItemFacts(Role.OTHER, "")


# Reminders.


@pytest.mark.parametrize(
    "content",
    [
        REMINDER,
        f" \n\t{REMINDER}",
        f"{REMINDER} Go on.",
        "<system-reminder>without an end",
        [{"type": "input_text", "text": f"\n{REMINDER}"}],
        [{"type": "text", "text": REMINDER}],
        [{"type": "input_text", "text": REMINDER}, {"type": "input_text", "text": "Go on."}],
        [REMINDER],
    ],
)
def test_a_user_message_whose_first_part_starts_with_the_tag_is_a_reminder(content: object) -> None:
    """White space before the tag does not count."""
    assert role_of(role="user", content=content) is Role.REMINDER


@pytest.mark.parametrize(
    "content",
    [
        f"Look: {REMINDER}",
        "<System-Reminder>the tag is written small",
        "<system-reminder kind='x'>the tag has no attributes",
        [{"type": "input_text", "text": "Go on."}, {"type": "input_text", "text": REMINDER}],
        [{"type": "input_image", "image_url": "x"}, {"type": "input_text", "text": REMINDER}],
        [{"type": "output_text", "text": REMINDER}],
        [{"type": "input_file", "text": REMINDER}],
        [{"text": REMINDER}],
        [{"type": "input_text", "text": [REMINDER]}],
        [{"type": "input_text"}],
        [[REMINDER]],
        {"type": "input_text", "text": REMINDER},
        {"text": REMINDER},
        17,
    ],
)
def test_the_tag_anywhere_else_is_ordinary_content(content: object) -> None:
    assert role_of(role="user", content=content) is Role.USER


@pytest.mark.parametrize("kind", ["function_call_output", "reasoning"])
def test_an_item_that_is_no_message_is_no_reminder(kind: str) -> None:
    assert role_of(type=kind, role="user", content=REMINDER, output=REMINDER) is Role.OTHER


def test_the_tag_may_be_written_with_escapes() -> None:
    """It is the text that counts, not its spelling in JSON."""
    item = rb'{"r\u006fle":"us\u0065r","content":"\u003csystem-reminder>x"}'
    assert item_facts(item).role is Role.REMINDER


# Calls and outputs.


@pytest.mark.parametrize(
    "kind",
    ["function_call", "custom_tool_call", "computer_call", "local_shell_call", "new_call", "_call"],
)
def test_whatever_is_a_call_with_a_call_id_makes_that_call(kind: str) -> None:
    facts = facts_of(type=kind, call_id="c1", id="fc_1", name="shell")
    assert facts == ItemFacts(Role.OTHER, kind, calls=("c1",))


@pytest.mark.parametrize(
    "kind",
    ["function_call_output", "custom_tool_call_output", "computer_call_output", "new_output"],
)
def test_whatever_is_an_output_with_a_call_id_answers_that_call(kind: str) -> None:
    facts = facts_of(type=kind, call_id="c1", id="fc_1", output="done")
    assert facts == ItemFacts(Role.OTHER, kind, outputs=("c1",))


@pytest.mark.parametrize("kind", ["function_call", "function_call_output"])
@pytest.mark.parametrize("call_id", [None, 7, ["c1"], {"id": "c1"}])
def test_a_call_id_that_is_no_string_pairs_nothing(kind: str, call_id: object) -> None:
    assert facts_of(type=kind, call_id=call_id) == ItemFacts(Role.OTHER, kind)


@pytest.mark.parametrize("kind", ["web_search_call", "file_search_call", "mcp_call"])
def test_a_server_side_call_waits_for_no_output(kind: str) -> None:
    """It has an id but no call_id, and its result in itself."""
    assert facts_of(type=kind, id="ws_1", status="completed") == ItemFacts(Role.OTHER, kind)


def test_the_output_of_a_local_shell_call_names_its_call_by_its_id() -> None:
    kind = "local_shell_call_output"
    assert facts_of(type=kind, id="c1") == ItemFacts(Role.OTHER, kind, outputs=("c1",))
    assert facts_of(type=kind, id="x", call_id="c1").outputs == ("c1",)
    assert facts_of(type=kind, id=1).outputs == ()


@pytest.mark.parametrize("kind", ["reasoning", "item_reference", "compaction", "call", "Call"])
def test_an_item_of_another_type_is_no_call_whatever_it_holds(kind: str) -> None:
    assert facts_of(type=kind, call_id="c1") == ItemFacts(Role.OTHER, kind)


@pytest.mark.parametrize("kind", [5, 1.5, True, ["message"], {"type": "message"}])
def test_a_type_that_is_no_string_is_an_unknown_type(kind: object) -> None:
    facts = facts_of(type=kind, role="system", call_id="c1")
    assert facts == ItemFacts(Role.OTHER, "")


# Chat Completions.


def test_the_tool_calls_of_an_assistant_are_the_calls_of_its_message() -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": "{}"}},
        {"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "x"}},
    ]
    facts = facts_of(role="assistant", content=None, tool_calls=calls)
    assert facts == ItemFacts(Role.OTHER, "message", calls=("c1", "c2"))


def test_tool_calls_without_a_usable_id_are_no_calls() -> None:
    calls = [{"id": None}, {"id": 3}, {}, "c1", ["c1"], None, {"id": "c2"}]
    assert facts_of(role="assistant", tool_calls=calls).calls == ("c2",)


@pytest.mark.parametrize("calls", [None, [], {}, {"id": "c1"}, "c1", 3])
def test_tool_calls_that_are_no_list_are_no_calls(calls: object) -> None:
    assert facts_of(role="assistant", tool_calls=calls).calls == ()


@pytest.mark.parametrize("role", ["user", "system"])
def test_only_what_the_model_said_makes_calls(role: str) -> None:
    assert facts_of(role=role, tool_calls=[{"id": "c1"}], tool_call_id="c1").calls == ()


def test_a_tool_message_answers_its_call() -> None:
    facts = facts_of(role="tool", tool_call_id="c1", content=REMINDER)
    assert facts == ItemFacts(Role.OTHER, "message", outputs=("c1",))


@pytest.mark.parametrize("call_id", [None, 4, ["c1"]])
def test_a_tool_message_without_a_usable_id_answers_nothing(call_id: object) -> None:
    assert facts_of(role="tool", tool_call_id=call_id) == ItemFacts(Role.OTHER, "message")


# What JSON allows.


def test_of_a_member_that_occurs_twice_the_last_one_counts() -> None:
    item = b'{"role":"system","type":"reasoning","role":"user","type":"message","content":"x"}'
    assert item_facts(item) == ItemFacts(Role.USER, "message")
    item = b'{"type":"new_call","call_id":"c1","call_id":"c2"}'
    assert item_facts(item).calls == ("c2",)
    item = b'{"type":"new_call","call_id":"c1","call_id":null}'
    assert item_facts(item).calls == ()


def test_white_space_between_tokens_does_not_matter() -> None:
    item = b' \n{ "type" : "new_call" ,\r\n\t"call_id" : "c1" } \n'
    assert item_facts(item) == ItemFacts(Role.OTHER, "new_call", calls=("c1",))


@pytest.mark.parametrize(
    "number",
    ["1e999", "-1e999", "1.0", DIGITS, f"-{DIGITS}", f"{DIGITS}.5"],
    ids=["huge", "-huge", "1.0", "digits", "-digits", "digits.5"],
)
@pytest.mark.parametrize(
    ("item", "role"),
    [
        ('{"role":"user","content":"x","n":NUMBER}', Role.USER),
        ('{"role":"user","content":[{"type":"text","text":"<system-reminder>","n":NUMBER}]}', None),
        ('{"role":"assistant","tool_calls":[{"id":"c1","n":NUMBER},NUMBER]}', Role.OTHER),
        ('{"type":NUMBER,"id":NUMBER,"call_id":NUMBER,"tool_call_id":NUMBER}', Role.OTHER),
        ('{"role":NUMBER,"content":NUMBER}', Role.OTHER),
        ('{"role":"user","content":NUMBER}', Role.USER),
    ],
)
def test_a_number_of_any_size_is_no_fault(number: str, item: str, role: Role | None) -> None:
    """Items keep their bytes (PROTOCOL.md §1), so nobody has to be able to read their numbers."""
    assert item_facts(item.replace("NUMBER", number).encode()).role is (role or Role.REMINDER)


@pytest.mark.parametrize(
    "item",
    [
        *(b"[]", b'[{"role":"user"}]', b'"x"', b"17", b"true", b"null"),
        *(b"", b" ", b"{", b'{"role":"user"', b'{"role":"user"}x', b"{}{}", b"{'role':'user'}"),
        *(b'{"n":NaN}', b'{"role":"\xff"}', b'\xef\xbb\xbf{"role":"user"}', b"[" * 100_000),
        b'{"role":"user","content":' + b"[" * 100_000,
    ],
)
def test_what_is_no_json_object_is_refused_by_its_place(item: bytes) -> None:
    """The error holds the place among the parameters, and nothing of what was sent."""
    with pytest.raises(InvalidItem) as caught:
        item_facts(item, "$.items[3]")
    assert caught.value.data == {"errors": [{"path": "$.items[3]", "expected": "a JSON object"}]}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
members = st.sampled_from(
    ["type", "role", "content", "id", "call_id", "tool_call_id", "tool_calls", "text"]
)
odd_values = json_values | st.lists(st.dictionaries(members, json_values), max_size=2)


@given(st.dictionaries(members, odd_values | st.sampled_from(["message", "user", "a_call"])))
def test_any_json_object_is_an_item(item: dict[str, Any]) -> None:
    """Unknown types and odd members are kept whole, never refused (PROTOCOL.md §2)."""
    facts = item_facts(json.dumps(item).replace("NaN", "0").replace("Infinity", "0").encode())
    assert len(facts.outputs) <= 1
    assert not (facts.calls and facts.outputs)
    assert facts.role is Role.OTHER or facts.type == "message"


# The text of the first part.


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("as a string", "as a string"),
        ([{"type": "input_text", "text": "in a part"}, {"type": "text", "text": "x"}], "in a part"),
        (["plain"], "plain"),
        ([{"type": "input_image"}], ""),
        ([], ""),
        (None, ""),
        ({}, ""),
    ],
)
def test_the_first_text_is_that_of_the_first_part_alone(content: object, text: str) -> None:
    assert first_text(json.dumps(content).encode()) == text


# One line.


def test_an_item_that_is_one_line_stays_the_very_same_bytes() -> None:
    item = '{"role":"user","content":"a\\nb\\r\u2028\u0085c"}'.encode()
    assert one_line(item) is item


def test_line_breaks_between_tokens_become_spaces() -> None:
    """They are white space there (RFC 8259 §2); within strings they can only be escaped (§7)."""
    assert one_line(b'{\r\n  "a": 1,\r"b":\n"\\n"\n}') == b'{    "a": 1, "b": "\\n" }'


@given(json_values, st.sampled_from([None, 0, 3]))
def test_one_line_says_the_same_and_is_as_long(value: Any, indent: int | None) -> None:
    item = json.dumps(value, indent=indent, ensure_ascii=False).encode(errors="replace")
    line = one_line(item.replace(b",\n", b",\r\n"))
    assert not set(line) & set(b"\r\n")
    assert len(line) == len(item.replace(b",\n", b",\r\n"))
    assert json.dumps(json.loads(line)) == json.dumps(json.loads(item))
