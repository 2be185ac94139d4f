"""Histories are written as words: `u` user, `s` assistant (says), `t` reasoning (thinks), `w` a
server-side call, `ca` and `oa` the call `a` and its output, `cab` a message that calls `a` and `b`.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recapd.daemon.compaction.groups import first_unanswered, groups
from recapd.protocol.items import ItemFacts, Role


def facts_of(words: str) -> list[ItemFacts]:
    return [_facts(word) for word in words.split()]


def _facts(word: str) -> ItemFacts:
    match word[0]:
        case "u":
            return ItemFacts(Role.USER, "message")
        case "t":
            return ItemFacts(Role.OTHER, "reasoning")
        case "w":
            return ItemFacts(Role.OTHER, "web_search_call")
        case "c":
            return ItemFacts(Role.OTHER, "function_call", calls=tuple(word[1:]))
        case "o":
            return ItemFacts(Role.OTHER, "function_call_output", outputs=tuple(word[1:]))
        case _:
            return ItemFacts(Role.OTHER, "message")


@pytest.mark.parametrize(
    "expected",
    [
        pytest.param("u | s | u", id="a message is a group by itself"),
        pytest.param("u | ca oa | s", id="a call and its output"),
        pytest.param("ca oa | cb ob", id="calls one after the other are two groups"),
        pytest.param("u | ca cb cd ob oa od | s", id="parallel calls, outputs in another order"),
        pytest.param("cab ob oa", id="two calls in one message"),
        pytest.param("ca cb ob | u", id="parallel calls, one of them unanswered"),
        pytest.param("ca u u oa | s", id="what stands between a call and its output"),
        pytest.param("ca u cb oa s ob | u", id="pairs that overlap"),
        pytest.param("ca oa u oa | s", id="a second output for the same call"),
        pytest.param("ca oa | u | ca oa", id="an id used again after its output is a new call"),
        pytest.param("ca u ca oa", id="an id used again before its output"),
        pytest.param("ca | u | s", id="an unanswered call"),
        pytest.param("oa | s | ca", id="an output without a call before it"),
        pytest.param("u | t ca oa | t cb ob", id="reasoning belongs to the call after it"),
        pytest.param("u | t t ca cb oa ob", id="all reasoning before parallel calls"),
        pytest.param("ca t cb oa ob", id="reasoning between parallel calls"),
        pytest.param("t s | t w | s", id="reasoning belongs to a message or server-side call too"),
        pytest.param("t | u", id="reasoning that led to nothing"),
        pytest.param("ca t oa | s", id="reasoning between a call and its output"),
        pytest.param("ca oa | t", id="reasoning at the end"),
        pytest.param("t | oa", id="reasoning before an output without a call"),
    ],
)
def test_a_history_falls_into_these_groups(expected: str) -> None:
    """`daemon/compaction/groups.py`; the parallel case is B01."""
    assert _spelt(expected.replace("|", "")) == expected


def _spelt(words: str) -> str:
    return " | ".join(
        " ".join(words.split()[position] for position in group) for group in groups(facts_of(words))
    )


def test_an_empty_history_has_no_groups() -> None:
    assert groups([]) == []
    assert first_unanswered([]) == 0


@pytest.mark.parametrize(
    ("words", "position"),
    [
        ("u s", 2),
        ("ca oa", 2),
        ("ca cb oa ob", 4),
        ("u ca cb oa", 2),
        ("u ca s cb ob", 1),
        ("cab oa", 0),
        ("ca oa ca", 2),
        ("ca ca oa", 3),
        ("oa ca", 1),
        ("ca u ca", 0),
        ("w s", 2),
    ],
)
def test_the_first_call_that_no_later_item_answers_is_found(words: str, position: int) -> None:
    """PROTOCOL.md §5.1; a server-side call (`w`) holds its own result."""
    assert first_unanswered(facts_of(words)) == position


WORDS = st.lists(
    st.sampled_from(["u", "s", "t", "w", "ca", "cb", "cd", "cab", "oa", "ob", "od"]), max_size=30
).map(" ".join)


@given(WORDS)
def test_groups_cover_every_item_once_and_in_order(words: str) -> None:
    spans = groups(facts_of(words))
    assert [position for span in spans for position in span] == list(range(len(words.split())))
    assert all(spans)


@given(WORDS)
def test_no_group_ends_between_a_call_and_its_output(words: str) -> None:
    facts = facts_of(words)
    for span in groups(facts):
        made = {call_id for fact in facts[: span.stop] for call_id in fact.calls}
        here = {call_id for position in span for call_id in facts[position].calls}
        for position in span:
            for call_id in facts[position].outputs:
                assert call_id in here or call_id not in made
