"""Summaries without a model: the shortened transcript, and the client's own text."""

import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapd.daemon.compaction.summarise.base import Source, Summary, accept
from recapd.daemon.compaction.summarise.given import given_summary
from recapd.daemon.compaction.summarise.offline import OfflineSummariser, offline_summary
from recapd.daemon.compaction.transcript import render
from recapd.protocol.errors import CompactionFailed
from recapd.storage.entry import Entry

Item = dict[str, Any]

MARK = re.compile(r"\[… ([0-9 ]+) entries left out, ids (\d+) to (\d+) …\]")


def said(role: str, text: str) -> Item:
    return {"role": role, "content": text}


def source_of(items: Sequence[Item], characters_max: int = 8_000) -> Source:
    body = [Entry(n, 0, msgspec.json.encode(item)) for n, item in enumerate(items, start=1)]
    return Source(body=tuple(body), characters_max=characters_max)


def test_what_fits_is_kept_whole() -> None:
    items = [said("user", "why?"), said("assistant", "x" * 7_000), said("user", "ah")]
    assert (
        offline_summary(source_of(items)) == f"user: why?\n\nassistant: {'x' * 7_000}\n\nuser: ah"
    )


def test_the_limit_is_met_exactly_and_missed_by_one() -> None:
    items = [said("user", "a" * 100), said("user", "b" * 100)]
    whole = offline_summary(source_of(items))
    assert offline_summary(source_of(items, len(whole))) == whole
    assert len(offline_summary(source_of(items, len(whole) - 1))) < len(whole)


def test_a_long_history_keeps_its_beginning_and_its_end() -> None:
    """A third from the beginning, the rest from the end, whole blocks, and a mark between."""
    items = [said("assistant", f"step {n} " + "x" * 80) for n in range(1, 1001)]
    blocks = offline_summary(source_of(items)).split("\n\n")
    marks = [position for position, block in enumerate(blocks) if MARK.fullmatch(block)]
    assert len(marks) == 1
    head, tail = blocks[: marks[0]], blocks[marks[0] + 1 :]
    kept = [int(block.split()[2]) for block in (*head, *tail)]
    assert kept == [*range(1, len(head) + 1), *range(1001 - len(tail), 1001)]
    mark = MARK.fullmatch(blocks[marks[0]])
    assert mark
    assert mark.groups() == (str(1000 - len(kept)), str(len(head) + 1), str(1000 - len(tail)))
    head_share = sum(map(len, head)) / sum(map(len, (*head, *tail)))
    assert 0.28 < head_share < 0.38
    assert all(block.endswith("x" * 80) for block in (*head, *tail))


@pytest.mark.parametrize("characters_max", range(2_000, 2_040))
def test_short_blocks_are_whole_whatever_the_limit(characters_max: int) -> None:
    items = [said("user", "why?"), *(said("assistant", "x" * 20) for _ in range(1_000))]
    items.insert(500, said("user", "how?"))
    blocks = offline_summary(source_of(items, characters_max)).split("\n\n")
    assert {block for block in blocks if not MARK.fullmatch(block)} == {
        "user: why?",
        "user: how?",
        "assistant: " + "x" * 20,
    }


def test_ten_thousand_entries_are_not_all_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[bytes] = []

    def counting(item: bytes) -> str:
        rendered.append(item)
        return render(item)

    monkeypatch.setattr("recapd.daemon.compaction.summarise.offline.render", counting)
    items = [said("assistant", f"step {n} " + "x" * 80) for n in range(10_000)]
    assert "9 9" in offline_summary(source_of(items))
    assert len(rendered) < 200
    assert len(set(rendered)) == len(rendered)


def test_a_long_block_is_shortened_inside_and_the_others_stay_whole() -> None:
    """B20, B44: one giant output does not cost the rest of the history."""
    items = [
        said("user", "fix the build"),
        {"type": "function_call_output", "call_id": "a", "output": "<" + "y" * 100_000 + ">"},
        said("assistant", "done"),
    ]
    first, giant, last = offline_summary(source_of(items)).split("\n\n")
    assert (first, last) == ("user: fix the build", "assistant: done")
    assert 7_900 < len(giant) < 8_000
    assert giant.startswith("output(a): <yyy")
    assert giant.endswith("yyy>")
    assert re.search(r"y\[… 92 \d\d\d characters left out …\]y", giant)


def test_long_blocks_share_the_room_evenly() -> None:
    items = [said("assistant", letter * 50_000) for letter in "abc"]
    blocks = offline_summary(source_of([said("user", "go"), *items])).split("\n\n")
    assert [len(block) for block in blocks] == [8, 2_662, 2_662, 2_662]


def test_many_long_blocks_leave_some_out() -> None:
    items = [said("assistant", letter * 50_000) for letter in "abcdefgh"]
    blocks = offline_summary(source_of(items)).split("\n\n")
    assert [block[:12] for block in blocks if "entries" not in block] == [
        f"assistant: {letter}" for letter in "agh"
    ]
    assert all(len(block) <= 2_000 for block in blocks)


def test_a_long_question_leaves_room_for_the_beginning_and_the_end() -> None:
    steps = [said("assistant", f"step {n} " + "x" * 5_000) for n in range(10)]
    items = [*steps[:5], said("user", "q" * 3_990), *steps[5:]]
    summary = offline_summary(source_of(items))
    assert "step 0 " in summary
    assert "q" * 3_990 in summary
    assert "step 9 " in summary


@pytest.mark.parametrize("position", [0, 100, 199], ids=["first", "middle", "last"])
def test_the_last_user_message_is_kept_whole(position: int) -> None:
    """It may be the only statement of what the work is about."""
    question = "please " + "and ".join(f"do {n} " for n in range(300))
    assert 2_000 < len(question) < 4_000
    items = [said("assistant", f"step {n} " + "x" * 200) for n in range(200)]
    items[position] = said("user", question)
    summary = offline_summary(source_of(items))
    assert f"user: {question.strip()}" in summary
    assert "step 1 " in summary or position == 0
    assert "step 198 " in summary
    assert len(summary) <= 8_000


def test_a_user_message_of_more_than_half_the_room_is_shortened_like_any_other() -> None:
    items = [said("user", "q" * 5_000), *(said("assistant", "x" * 300) for _ in range(50))]
    summary = offline_summary(source_of(items))
    assert len(summary) <= 8_000
    assert "characters left out" in summary.split("\n\n")[0]


def test_a_question_beside_an_old_reminder_counts_as_a_user_message() -> None:
    """B28."""
    question = "<system-reminder>note</system-reminder>please fix the login"
    steps = [said("assistant", f"step {n} " + "x" * 200) for n in range(200)]
    items = [*steps[:100], said("user", question), *steps[100:]]
    assert "please fix the login" in offline_summary(source_of(items))


def test_secrets_are_taken_out_before_anything_is_shortened() -> None:
    """Half a secret would not be known for one."""
    items = [said("user", "x" * 100 + "secret" * 1_000 + "x" * 100) for _ in range(20)]
    body = source_of(items, 1_000).body
    shortened = Source(
        body=body, characters_max=1_000, redact=lambda text: text.replace("secret" * 1_000, "[key]")
    )
    assert "sec" not in offline_summary(shortened)
    assert "[key]" in offline_summary(shortened)


def test_nothing_to_summarise_is_said_in_words() -> None:
    assert offline_summary(Source()).strip()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=400)


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXTS), max_size=60),
    st.integers(400, 3_000),
)
def test_a_summary_keeps_to_its_limit_and_accounts_for_every_entry(
    texts: list[tuple[str, str]], characters_max: int
) -> None:
    """Each entry is a block or counted in a mark; the same source gives the same summary."""
    items = [said(role, text.replace("\n", " ")) for role, text in texts]
    source = source_of(items, characters_max)
    summary = offline_summary(source)
    assert len(summary) <= characters_max
    assert offline_summary(source) == summary
    blocks = summary.split("\n\n")
    marks = [mark for block in blocks if (mark := MARK.fullmatch(block))]
    assert len(marks) <= 2
    left_out = sum(int(mark[1].replace(" ", "")) for mark in marks)
    assert left_out == sum(int(mark[3]) - int(mark[2]) + 1 for mark in marks)
    if items:
        assert left_out + len(blocks) - len(marks) == len(items)


@pytest.mark.parametrize("characters_max", [0, 1, 50, 100, 200])
def test_a_limit_too_small_for_anything_gives_a_mark(characters_max: int) -> None:
    items = [said("assistant", "x" * 500) for _ in range(20)]
    summary = offline_summary(source_of(items, characters_max))
    assert "left out" in summary
    assert len(summary) <= max(characters_max, 40)


async def test_the_offline_summariser_gives_that_summary() -> None:
    source = source_of([said("user", "hello")])
    assert await OfflineSummariser()(source) == Summary("user: hello", "offline")


async def test_the_clients_own_summary_is_taken_as_it_is() -> None:
    own = given_summary("We fixed\n\nthe build. ")
    assert await own(Source()) == Summary("We fixed\n\nthe build.", "client")


@pytest.mark.parametrize("text", ["", " ", "\n\t\u2028\u00a0", "half \ud83d of an emoji"])
def test_a_summary_that_is_blank_or_no_text_is_refused(text: str) -> None:
    """B15, B44."""
    for take in (accept, given_summary):
        with pytest.raises(CompactionFailed) as caught:
            take(text)
        assert caught.value.data["stage"] == "accept"
        assert caught.value.hint
