"""Sessions are listed by what is asked for, in a total order, and page by page without gaps."""

from collections.abc import Callable

import pytest

from recapd.storage.store import (
    NewItem,
    NewSession,
    Order,
    Query,
    Session,
    SessionChanges,
    SortKey,
    Store,
)

ITEM = NewItem(b'{"role":"user","content":"hi"}', 3)


async def listed(store: Store, query: Query) -> str:
    """The ids in the order in which they came; each is one letter."""
    return "".join(session.session_id for session in await store.sessions(query))


@pytest.fixture(autouse=True)
async def sessions(store: Store, advance: Callable[[int], int]) -> None:
    """Made in the order b, a, d, c, two at a time; then b and c are touched at one time."""
    await store.create(NewSession("b", "Fix 100% of it", "/x", {"team": "1", "os": "l"})).wait()
    await store.create(NewSession("a", "fix_me", "/x", {"team": "1"})).wait()
    advance(10)
    await store.create(NewSession("d", None, "/x/y", {"team": "2", "os": "l"})).wait()
    await store.create(NewSession("c", "Änderung", None)).wait()
    advance(10)
    await store.append("b", [ITEM]).wait()
    await store.update("c", SessionChanges(state="archived")).wait()


async def test_without_a_question_every_session_is_listed_latest_first(store: Store) -> None:
    found = await store.sessions(Query())
    assert "".join(session.session_id for session in found) == "cbda"
    assert found == [await store.session(session_id) for session_id in "cbda"]


@pytest.mark.parametrize(
    ("sort", "order", "expected"),
    [
        ("updated_at", "asc", "adbc"),
        ("updated_at", "desc", "cbda"),
        ("created_at", "asc", "abcd"),
        ("created_at", "desc", "dcba"),
        ("session_id", "asc", "abcd"),
        ("session_id", "desc", "dcba"),
    ],
)
async def test_sessions_of_equal_time_are_listed_by_id_in_the_same_direction(
    store: Store, sort: SortKey, order: Order, expected: str
) -> None:
    assert await listed(store, Query(sort=sort, order=order)) == expected


def place(session: Session, sort: SortKey) -> tuple[int | str, str]:
    """Where a session stands in a list: what the next query goes on behind."""
    match sort:
        case "updated_at":
            return session.updated_at_ms, session.session_id
        case "created_at":
            return session.created_at_ms, session.session_id
        case "session_id":
            return session.session_id, session.session_id


@pytest.mark.parametrize("limit", [1, 2, 3, 4])
@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("sort", ["updated_at", "created_at", "session_id"])
async def test_pages_of_a_list_have_no_gaps_and_no_repeats(
    store: Store, sort: SortKey, order: Order, limit: int
) -> None:
    whole = await store.sessions(Query(sort=sort, order=order))
    found: list[Session] = []
    after: tuple[int | str, str] | None = None
    while page := await store.sessions(Query(sort=sort, order=order, limit=limit, after=after)):
        assert len(page) <= limit
        found += page
        after = place(page[-1], sort)
    assert found == whole


async def test_a_list_goes_on_behind_a_session_that_was_deleted(store: Store) -> None:
    last = await store.session("b")
    await store.delete("b").wait()
    query = Query(sort="session_id", order="asc", after=place(last, "session_id"))
    assert await listed(store, query) == "cd"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Query(state="active"), "abd"),
        (Query(state="archived"), "c"),
        (Query(cwd="/x"), "ab"),
        (Query(cwd="/"), ""),
        (Query(labels={"team": "1"}), "ab"),
        (Query(labels={"os": "l"}), "bd"),
        (Query(labels={"team": "1", "os": "l"}), "b"),
        (Query(labels={"team": ""}), ""),
        (Query(labels={"other": "1"}), ""),
        (Query(title_contains="fix"), "ab"),
        (Query(title_contains="FIX_"), "a"),
        (Query(title_contains="0%"), "b"),
        (Query(title_contains="%"), "b"),
        (Query(title_contains="nderung"), "c"),
        (Query(title_contains=""), "abc"),
        (Query(title_contains="fix", labels={"os": "l"}, state="active", cwd="/x"), "b"),
        (Query(title_contains="fix", state="archived"), ""),
    ],
)
async def test_only_sessions_that_fit_every_filter_are_listed(
    store: Store, query: Query, expected: str
) -> None:
    found = await listed(store, query)
    assert "".join(sorted(found)) == expected


async def test_filters_by_time_leave_their_own_instant_out(
    store: Store, advance: Callable[[int], int]
) -> None:
    last_ms = advance(0)
    assert await listed(store, Query(updated_after_ms=last_ms)) == ""
    assert await listed(store, Query(updated_after_ms=last_ms - 1)) == "cb"
    assert await listed(store, Query(updated_after_ms=last_ms - 10)) == "cb"
    assert await listed(store, Query(updated_before_ms=last_ms)) == "da"
    assert await listed(store, Query(updated_before_ms=last_ms - 10)) == "a"
    between = Query(updated_after_ms=last_ms - 20, updated_before_ms=last_ms)
    assert await listed(store, between) == "d"


async def test_filters_hold_on_every_page(store: Store) -> None:
    query = Query(labels={"team": "1"}, limit=1)
    assert await listed(store, query) == "b"
    behind = Query(
        labels={"team": "1"}, limit=1, after=place(await store.session("b"), "updated_at")
    )
    assert await listed(store, behind) == "a"


async def test_a_deleted_session_is_not_listed(store: Store) -> None:
    await store.delete("b").wait()
    assert await listed(store, Query()) == "cda"
