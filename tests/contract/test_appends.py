"""Items are appended all or none, come back as the same bytes; answers without calls are named."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recapd.storage.entry import Entry, encode_entry, item_of
from recapd.storage.store import Appended, NewItem, NewSession, Session, Store, Tokens

ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)


def call(*call_ids: str) -> NewItem:
    return NewItem(b'{"type":"function_call"}', 1, calls=call_ids)


def output(*call_ids: str) -> NewItem:
    return NewItem(b'{"type":"function_call_output"}', 1, outputs=call_ids)


async def append(store: Store, *items: NewItem) -> Appended:
    appended = await store.append("s", items).wait()
    assert isinstance(appended, Appended)
    return appended


async def test_an_append_is_one_revision_whatever_it_holds(
    store: Store, advance: Callable[[int], int]
) -> None:
    await store.create(NewSession("s"), [ITEM]).wait()
    first_ms, second_ms = advance(0), advance(1500)
    appended = await append(store, ITEM, NewItem(b"{}", 4))
    session = appended.session
    assert session == await store.session("s")
    assert (appended.first_entry_id, appended.last_entry_id, appended.unmatched) == (2, 3, ())
    assert (session.revision, session.generation, session.entries) == (2, 0, 3)
    assert (session.next_entry_id, session.tokens) == (4, Tokens(0, 10))
    assert (session.created_at_ms, session.updated_at_ms) == (first_ms, second_ms)
    page = await store.page("s", limit=10, bytes_max=1000)
    assert page.entries == [
        encode_entry(Entry(1, first_ms, ITEM.item)),
        encode_entry(Entry(2, second_ms, ITEM.item)),
        encode_entry(Entry(3, second_ms, b"{}")),
    ]


@pytest.mark.parametrize(
    "item",
    [
        b'{"a":1.0,"b":12345678901234567890123,"a":1e999}',
        '{"text":"\\u00e9 é \u2028 \\/ \\ud83d\\ude00 😀"}'.encode(),
        b' { "item" : {"item":null} , "id":7 }\t',
    ],
)
async def test_an_item_comes_back_byte_for_byte(store: Store, item: bytes) -> None:
    """DESIGN.md §2, promise 6."""
    await store.create(NewSession("s")).wait()
    await append(store, NewItem(item, 1))
    (line,) = (await store.page("s", limit=1, bytes_max=1000)).entries
    assert item_of(line) == item


async def test_an_output_whose_call_is_missing_is_kept_and_named(store: Store) -> None:
    await store.create(NewSession("s"), [call("a")]).wait()
    appended = await append(store, output("a"), ITEM, output("b", "a", "c"), output("b"))
    assert appended.unmatched == ((4, "b"), (4, "c"), (5, "b"))
    assert appended.session.entries == 5


async def test_a_call_answers_for_what_comes_after_it_only(store: Store) -> None:
    await store.create(NewSession("s")).wait()
    both = NewItem(b"{}", 1, calls=("b",), outputs=("b",))
    appended = await append(store, output("a"), call("a"), output("a"), both, output("b"))
    assert appended.unmatched == ((1, "a"), (4, "b"))
    assert (await append(store, output("a", "b"))).unmatched == ()


async def test_calls_of_another_session_answer_for_nothing(store: Store) -> None:
    await store.create(NewSession("t"), [call("a")]).wait()
    await store.create(NewSession("s")).wait()
    assert (await append(store, output("a"))).unmatched == ((1, "a"),)


async def test_after_a_replacement_only_the_calls_it_kept_count(
    store: Store, replace_history: Callable[..., Awaitable[Session]]
) -> None:
    await store.create(NewSession("s"), [call("a"), call("b")]).wait()
    await replace_history(store, "s", "o", [Entry(2, 0, call("b").item)], calls=["b"])
    assert (await append(store, output("a", "b"))).unmatched == ((3, "a"),)


@settings(
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    appends=st.lists(
        st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=4),
        max_size=5,
    )
)
async def test_outputs_are_unmatched_exactly_when_no_item_before_them_made_their_call(
    open_new: Callable[[], AbstractAsyncContextManager[Store]],
    appends: list[list[tuple[str, bool]]],
) -> None:
    made: set[str] = set()
    entry_id = 0
    async with open_new() as store:
        await store.create(NewSession("s")).wait()
        for items in appends:
            missing: list[tuple[int, str]] = []
            for call_id, makes in items:
                entry_id += 1
                if makes:
                    made.add(call_id)
                elif call_id not in made:
                    missing.append((entry_id, call_id))
            some = [call(call_id) if makes else output(call_id) for call_id, makes in items]
            assert (await append(store, *some)).unmatched == tuple(missing)
