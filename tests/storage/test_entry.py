"""An entry has one written form, from which its item's own bytes can be cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapd.storage.entry import Entry, Reminder, decode_entry, encode_entry, encode_time, item_of

FIRST_MS = -62_135_596_800_000  # 0001-01-01T00:00:00Z
LAST_MS = 253_402_300_799_999  # 9999-12-31T23:59:59.999Z

reminders = st.builds(
    Reminder,
    generation=st.integers(0, 2**53),
    operation_id=st.text(),
    archived_revision=st.integers(0, 2**53),
)
entries = st.builds(
    Entry,
    entry_id=st.integers(1, 2**53),
    at_ms=st.integers(FIRST_MS, LAST_MS),
    item=st.dictionaries(st.text(), st.text() | st.sampled_from([',"item":', '"item":{}'])).map(
        lambda item: json.dumps(item).encode()
    ),
    reminder=st.none() | reminders,
)


@given(entries)
def test_an_entry_comes_back_from_its_line(entry: Entry) -> None:
    """Promise 6: byte for byte."""
    line = encode_entry(entry)
    assert decode_entry(line) == entry
    assert item_of(line) == entry.item


@given(entries)
def test_a_line_is_json_that_ends_in_the_item(entry: Entry) -> None:
    """PROTOCOL.md §2, Entry: the reminder stands beside the item, never inside it."""
    line = encode_entry(entry)
    members = json.loads(line)
    assert list(members)[-1] == "item"
    assert members["id"] == entry.entry_id
    assert members["item"] == json.loads(entry.item)
    assert ("reminder" in members) == (entry.reminder is not None)
    assert b"\n" not in line


def test_an_item_may_contain_the_text_before_which_it_is_cut() -> None:
    """The cut is at the first place, and nothing before the item can contain it."""
    item = b'{"text":",\\"item\\":","item":{"item":[{"item":1}]}}'
    reminder = Reminder(1, ',"item":', 2)
    entry = Entry(7, 1_796_083_200_000, item, reminder)
    assert item_of(encode_entry(entry)) == item
    assert decode_entry(encode_entry(entry)) == entry


def test_the_bytes_of_an_item_are_not_read() -> None:
    """PROTOCOL.md §1, Values: big integers, `1.0`, escapes and white space as they came."""
    item = b'{ "n":123456789012345678901234567890, "f":1.0,"e":1E400, "\\u0061":"\\ud83d\\ude00" }'
    assert item_of(encode_entry(Entry(1, 0, item))) == item


@pytest.mark.parametrize(
    ("at_ms", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
        (1_796_083_200_007, "2026-12-01T00:00:00.007Z"),
        (FIRST_MS, "0001-01-01T00:00:00.000Z"),
        (LAST_MS, "9999-12-31T23:59:59.999Z"),
    ],
)
def test_an_instant_is_written_in_one_form_of_one_length(at_ms: int, text: str) -> None:
    """PROTOCOL.md §2: RFC 3339 in UTC; a year before 1000 has its zeros."""
    assert encode_time(at_ms) == text
    assert decode_entry(encode_entry(Entry(1, at_ms, b"{}"))).at_ms == at_ms


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"not json",
        b'{"id":1}',
        b'{"id":1,"at":"2026-12-01T00:00:00.000Z"}',
        b'{"id":x,"at":"2026-12-01T00:00:00.000Z","item":{}}',
        b'{"id":1,"at":"2026-13-01T00:00:00.000Z","item":{}}',
        b'{"id":1,"at":"2026-12-01T00:00:00.abcZ","item":{}}',
        b'{"id":1,"at":"2026-12-01T00:00:00.000Z","item":17',
        b'{"no":1,"at":"2026-12-01T00:00:00.000Z","item":{}}',
        b'{"id":1,"on":"2026-12-01T00:00:00.000Z","item":{}}',
        b'{"id":1,"at":"2026-12-01T00:00:00.000Z","reminder":{},"item":{}}',
        b'{"id":1,"at":"2026-12-01T00:00:00.000Z","reminder":17,"item":{}}',
    ],
)
def test_what_is_no_entry_is_refused(line: bytes) -> None:
    """The docstring of `decode_entry`: ValueError, whatever is wrong with it."""
    with pytest.raises(ValueError):  # noqa: PT011  # its text is for nobody
        decode_entry(line)
