"""Access tokens: kept until they are removed or expire."""

from collections.abc import Callable

from recapd.storage.store import AccessToken, Event, NewSession, Query, Store


def token(name: str, at_ms: int, expires_at_ms: int | None = None) -> AccessToken:
    return AccessToken(
        name,
        name.encode(),
        f"{name}'s \N{SNOWMAN}",
        ("session.read", "admin"),
        None if expires_at_ms is None else ("a", "b"),
        None if name == "a" else "a",
        at_ms,
        expires_at_ms,
    )


async def test_tokens_are_kept_as_they_were_given_oldest_first(
    store: Store, heard: list[Event], advance: Callable[[int], int]
) -> None:
    now_ms = advance(0)
    tokens = [token("b", now_ms), token("c", now_ms, now_ms + 1), token("a", now_ms + 1)]
    for one in reversed(tokens):
        await store.add_token(one).wait()
    assert await store.tokens() == tokens
    await store.remove_tokens(["b", "a", "none"]).wait()
    assert await store.tokens() == tokens[1:2]
    assert heard == []


async def test_a_new_token_takes_the_place_of_those_that_have_expired(
    store: Store, advance: Callable[[int], int]
) -> None:
    now_ms = advance(0)
    for name, after_ms in (("a", 1000), ("b", 1001), ("c", 999)):
        await store.add_token(token(name, now_ms, now_ms + after_ms)).wait()
    advance(1000)
    assert len(await store.tokens()) == 3
    await store.add_token(token("d", now_ms + 1000)).wait()
    assert [one.token_id for one in await store.tokens()] == ["b", "d"]


async def test_a_list_may_be_of_some_sessions_only(store: Store) -> None:
    for name in "abcd":
        await store.create(NewSession(name)).wait()
    for only in ((), ("b", "d", "none"), ('x"]', "a")):
        query = Query(sort="session_id", order="asc", only=only)
        shown = [session.session_id for session in await store.sessions(query)]
        assert shown == [name for name in "abcd" if name in only]
