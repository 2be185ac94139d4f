"""A history is read in pages that hold each entry once and go on in the history they began."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recapd.storage.entry import Entry, decode_entry
from recapd.storage.errors import RevisionUnknown
from recapd.storage.store import NewItem, NewSession, Order, Page, Session, Store

ReplaceHistory = Callable[..., Awaitable[Session]]

ORDERS: tuple[Order, ...] = ("asc", "desc")


def item(number: int, size: int = 0) -> NewItem:
    return NewItem(b'{"n":%d,"pad":"%b"}' % (number, b"x" * size), 1)


def ids(page: Page) -> list[int]:
    return [decode_entry(line).entry_id for line in page.entries]


@pytest.fixture(autouse=True)
async def session(store: Store) -> None:
    """There is a session `s` of five entries."""
    await store.create(NewSession("s"), [item(n) for n in range(5)]).wait()


async def test_a_page_holds_the_first_entries_and_says_where_the_next_begins(store: Store) -> None:
    page = await store.page("s", limit=2, bytes_max=1000)
    assert (ids(page), page.next_index, page.total) == ([1, 2], 2, 5)
    assert (page.revision, page.generation) == (1, 0)
    assert page.session == await store.session("s")
    page = await store.page("s", start=2, limit=2, bytes_max=1000)
    assert (ids(page), page.next_index) == ([3, 4], 4)
    page = await store.page("s", start=4, limit=2, bytes_max=1000)
    assert (ids(page), page.next_index) == ([5], None)


async def test_a_page_in_descending_order_begins_with_the_last_entry(store: Store) -> None:
    page = await store.page("s", limit=2, bytes_max=1000, order="desc")
    assert (ids(page), page.next_index) == ([5, 4], 2)
    page = await store.page("s", start=2, limit=3, bytes_max=1000, order="desc")
    assert (ids(page), page.next_index) == ([3, 2, 1], None)


async def test_a_page_that_ends_with_the_history_says_so(store: Store) -> None:
    for order in ORDERS:
        page = await store.page("s", limit=5, bytes_max=1000, order=order)
        assert (len(page.entries), page.next_index) == (5, None)
    page = await store.page("s", start=5, limit=5, bytes_max=1000)
    assert (page.entries, page.next_index) == ([], None)


async def test_an_empty_history_is_one_empty_page(store: Store) -> None:
    await store.create(NewSession("t")).wait()
    for order in ORDERS:
        page = await store.page("t", limit=5, bytes_max=1000, order=order)
        assert (page.entries, page.next_index, page.total, page.revision) == ([], None, 0, 0)


async def test_a_page_keeps_to_its_bytes_but_always_holds_an_entry(store: Store) -> None:
    for order in ORDERS:
        page = await store.page("s", limit=5, bytes_max=0, order=order)
        assert len(page.entries) == 1
        two = 2 * (len(page.entries[0]) + 1)  # with their line ends
        page = await store.page("s", limit=5, bytes_max=two, order=order)
        assert len(page.entries) == 2
        page = await store.page("s", limit=5, bytes_max=two - 1, order=order)
        assert len(page.entries) == 1


async def test_only_the_first_entries_are_the_history_when_told_so(store: Store) -> None:
    page = await store.page("s", total=3, limit=10, bytes_max=1000)
    assert (ids(page), page.next_index, page.total) == ([1, 2, 3], None, 3)
    page = await store.page("s", total=3, limit=2, bytes_max=1000, order="desc")
    assert (ids(page), page.next_index, page.total) == ([3, 2], 0, 3)
    page = await store.page("s", total=0, limit=2, bytes_max=1000, order="desc")
    assert (page.entries, page.next_index, page.total) == ([], None, 0)


async def test_an_archived_history_is_read_by_its_revision_or_its_generation(
    store: Store, replace_history: ReplaceHistory
) -> None:
    await replace_history(store, "s", "o", [Entry(2, 0, b"{}"), Entry(6, 0, b"{}")])
    await store.append("s", [item(7)]).wait()
    await replace_history(store, "s", "p", [Entry(8, 0, b"{}")])
    for revision, generation, entry_ids in ((1, 0, [1, 2, 3, 4, 5]), (3, 1, [2, 6, 7])):
        for page in (
            await store.page("s", revision=revision, limit=10, bytes_max=1000),
            await store.page("s", generation=generation, limit=10, bytes_max=1000),
        ):
            assert ids(page) == entry_ids
            assert (page.revision, page.generation) == (revision, generation)
            assert (page.total, page.next_index) == (len(entry_ids), None)
            assert page.session == await store.session("s")
    page = await store.page("s", generation=2, limit=10, bytes_max=1000)
    assert (ids(page), page.revision) == ([8], 4)


async def test_an_archived_history_is_read_in_pages_like_the_present_one(
    store: Store, replace_history: ReplaceHistory
) -> None:
    async def read(generation: int) -> list[object]:
        seen: list[object] = []
        for order in ORDERS:
            for start in (None, 0, 1, 4):
                for total in (None, 3, 5, 9):
                    for limit, bytes_max in ((1, 1000), (3, 1000), (10, 130), (10, 1000)):
                        page = await store.page(
                            "s",
                            generation=generation,
                            start=start,
                            total=total,
                            limit=limit,
                            bytes_max=bytes_max,
                            order=order,
                        )
                        seen.append((page.entries, page.next_index, page.total, page.revision))
        return seen

    live = await read(0)
    await replace_history(store, "s", "o", [])
    assert await read(0) == live


@pytest.mark.parametrize(("revision", "generation"), [(0, None), (2, None), (None, 2), (9, 1)])
async def test_a_revision_that_was_never_archived_is_unknown(
    store: Store,
    replace_history: ReplaceHistory,
    revision: int | None,
    generation: int | None,
) -> None:
    """Never something else instead (DESIGN.md §2, promise 5)."""
    await replace_history(store, "s", "o", [])
    await store.append("s", [item(9)]).wait()
    with pytest.raises(RevisionUnknown):
        await store.page("s", revision=revision, generation=generation, limit=1, bytes_max=1000)


async def test_pages_go_on_in_the_history_they_began_whatever_happens_to_it(
    store: Store, replace_history: ReplaceHistory
) -> None:
    """A cursor pins generation and total: a page never mixes two revisions (PROTOCOL.md §3)."""

    async def next_page(page: Page, order: Order) -> Page:
        return await store.page(
            "s",
            generation=page.generation,
            total=page.total,
            start=page.next_index,
            limit=2,
            bytes_max=1000,
            order=order,
        )

    first = [await store.page("s", limit=2, bytes_max=1000, order=order) for order in ORDERS]
    await store.append("s", [item(6)]).wait()
    second = [await next_page(page, order) for page, order in zip(first, ORDERS, strict=True)]
    await replace_history(store, "s", "o", [Entry(2, 0, b"{}")])
    third = [await next_page(page, order) for page, order in zip(second, ORDERS, strict=True)]
    for pages, entry_ids in zip(
        zip(first, second, third, strict=True), ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]), strict=True
    ):
        assert [entry_id for page in pages for entry_id in ids(page)] == entry_ids
    assert [(page.next_index, page.total) for page in third] == [(None, 5), (None, 5)]


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=8),
    limit=st.integers(1, 9),
    bytes_max=st.integers(0, 400),
    order=st.sampled_from(("asc", "desc")),
    archived=st.booleans(),
)
async def test_all_pages_together_hold_each_entry_once(
    open_new: Callable[[], AbstractAsyncContextManager[Store]],
    sizes: list[int],
    limit: int,
    bytes_max: int,
    order: Order,
    archived: bool,
    replace_history: ReplaceHistory,
) -> None:
    async with open_new() as store:
        await store.create(NewSession("s")).wait()
        if sizes:
            await store.append("s", [item(n, size) for n, size in enumerate(sizes)]).wait()
        whole = await store.page("s", limit=100, bytes_max=1 << 20, order=order)
        if archived:
            await replace_history(store, "s", "o", [])
        lines: list[bytes] = []
        start: int | None = None
        while True:
            page = await store.page(
                "s", generation=0, start=start, limit=limit, bytes_max=bytes_max, order=order
            )
            held = sum(len(line) + 1 for line in page.entries)
            assert len(page.entries) <= min(limit, len(sizes))
            assert held <= bytes_max or len(page.entries) == 1
            lines += page.entries
            if page.next_index is None:
                break
            following = whole.entries[len(lines)]
            assert len(page.entries) == limit or held + len(following) + 1 > bytes_max
            start = page.next_index
        assert lines == whole.entries
        assert len(lines) == len(sizes)
