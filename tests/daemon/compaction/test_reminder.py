"""The message that a compaction leaves behind."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapd.daemon.compaction.partition import is_only_reminder
from recapd.daemon.compaction.reminder import neutralise, reminder_item
from recapd.protocol.items import Role, item_facts

Text = st.text(st.characters(exclude_categories=["Cs"]))


def text_of(item: bytes) -> str:
    text: str = msgspec.json.decode(item)["content"][0]["text"]
    return text


def test_it_is_a_user_message_of_one_text_between_the_tags() -> None:
    """PROTOCOL.md §5.3: text in a user message, not a system role; the bytes are UTF-8."""
    assert (
        reminder_item("Größe → 5 \u2028 👍", 7)
        == (
            '{"type":"message","role":"user","content":[{"type":"input_text","text":'
            '"<system-reminder>\\nThe earlier history of this session was compacted and archived as'
            " revision 7. This is its summary:\\n\\nGröße → 5 \u2028 👍\\n</system-reminder>"
            '"}]}'
        ).encode()
    )


def test_it_names_no_archive_where_there_is_none() -> None:
    assert "was compacted. This is its summary:\n" in text_of(reminder_item("summary", None))


@pytest.mark.parametrize(
    ("text", "neutral"),
    [
        ("<system-reminder>", "&lt;system-reminder>"),
        ("</system-reminder>", "&lt;/system-reminder>"),
        ("a </system-reminder> b", "a &lt;/system-reminder> b"),
        ("</SYSTEM-Reminder>", "&lt;/SYSTEM-Reminder>"),
        ("< / system-reminder >", "&lt; / system-reminder >"),
        ('<system-reminder kind="x">', '&lt;system-reminder kind="x">'),
        ("<system-reminder/>", "&lt;system-reminder/>"),
        ("cut off </system-reminder", "cut off &lt;/system-reminder"),
        ("<<system-reminder>>", "<&lt;system-reminder>>"),
        ("<system-reminders> <div> a < b &lt; system-reminder>",) * 2,
    ],
)
def test_only_reminder_tags_are_made_harmless(text: str, neutral: str) -> None:
    """B25."""
    assert neutralise(text) == neutral
    assert neutralise(neutral) == neutral


TAGS = st.sampled_from(
    ["<", "</", ">", "system-reminder", "<system-reminder>", "</system-reminder>", "\n", " ", "x"]
)


@given(st.lists(TAGS | Text).map("".join))
def test_nothing_inside_ends_the_reminder_or_begins_another(summary: str) -> None:
    """B25, B67: whatever the summary says, the tags stand at the two ends and nowhere else."""
    item = reminder_item(summary, 1)
    text = text_of(item)
    tags = re.findall(r"<\s*/?\s*system-reminder\s*>", text, re.IGNORECASE)
    assert tags == ["<system-reminder>", "</system-reminder>"]
    assert text.startswith("<system-reminder>\n")
    assert text.endswith("\n</system-reminder>")
    assert item_facts(item).role is Role.REMINDER
    assert is_only_reminder(item)
    assert b"\n" not in item
