"""Whatever is asked of it, a Store answers as `memory.py`, the executable specification, does."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recapd.storage.entry import Entry, Reminder, encode_entry
from recapd.storage.errors import StoreError
from recapd.storage.memory import open_memory_store
from recapd.storage.pending import Pending
from recapd.storage.store import (
    AutoCompact,
    Event,
    Expect,
    History,
    Kind,
    NewItem,
    NewSession,
    Parent,
    Receipt,
    Replacement,
    SessionChanges,
    Store,
    Tokens,
)

OPERATION_IDS = ("o", "p", "q")


class Change(msgspec.Struct, frozen=True):
    """A change to hand over: the Store's method and what it is called with."""

    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any] = {}


class Replace(msgspec.Struct, frozen=True):
    """An archive to make, and then a replacement by entries of these ids to hand over."""

    session_id: str
    kind: Kind
    operation_id: str
    changes_before: list[Change]
    entry_ids: list[int]
    receipt: Receipt | None


class Step(msgspec.Struct, frozen=True):
    """What happens after some time; the changes are handed over all at once."""

    after_ms: int
    replace: Replace | None
    changes: list[Change]


def render(result: object) -> bytes:
    return msgspec.json.encode(result)


def hand_over(store: Store, change: Change) -> Pending[Any]:
    pending: Pending[Any] = getattr(store, change.method)(*change.arguments, **change.options)
    return pending


def history_of(ids: Sequence[int], next_entry_id: int) -> History:
    entries = [Entry(n, n, b'{"n":%d}' % n, Reminder(1, "o", n) if n % 2 else None) for n in ids]
    return History([*map(encode_entry, entries)], ["a"], next_entry_id, Tokens(len(ids), 0))


async def hand_over_replacement(store: Store, replace: Replace) -> list[Pending[Any]]:
    archive = await store.archive(
        await store.session(replace.session_id), replace.kind, replace.operation_id
    )
    ids = replace.entry_ids
    new = Replacement(
        replace.operation_id,
        archive,
        history_of(ids, 100 * (archive.generation + 1)),
        event={"retained_entry_ids": ids},
        finished={"quality": "offline"},
    )
    return [
        *(hand_over(store, change) for change in replace.changes_before),
        store.replace(replace.session_id, new, receipt=replace.receipt, render=render),
    ]


async def outcome_of(result: Awaitable[object]) -> object:
    try:
        return await result
    except StoreError as error:
        return type(error), error.args


async def run(store: Store, steps: Sequence[Step], advance: Callable[[int], int]) -> list[object]:
    """The outcomes of all changes, and the events that were heard."""
    heard: list[Event] = []
    store.listen(heard.extend)
    outcomes: list[object] = []
    for step in steps:
        advance(step.after_ms)
        handed_over: list[Pending[Any]] = []
        if step.replace is not None:
            try:
                handed_over += await hand_over_replacement(store, step.replace)
            except StoreError as error:
                outcomes.append(type(error))
        handed_over += [hand_over(store, change) for change in step.changes]
        outcomes += [await outcome_of(pending.wait()) for pending in handed_over]
    return [*outcomes, heard]


session_ids = st.sampled_from("st")
call_ids = st.lists(st.sampled_from("ab"), max_size=2).map(tuple)
items = st.builds(NewItem, st.just(b'{"n":1.0}'), st.integers(0, 5), call_ids, call_ids)
receipts = st.builds(
    Receipt,
    st.sampled_from(OPERATION_IDS),
    st.sampled_from(("m", "m", "m", "n")),
    st.just(b""),
)
expects = st.builds(
    Expect,
    st.sampled_from((None, None, None, 0, 1, 2)),
    st.sampled_from((None, None, None, 0, 1)),
)
options = st.fixed_dictionaries(
    {"receipt": st.none() | receipts, "render": st.just(render)}, optional={"expect": expects}
)
options_of_create = options.map(lambda given: {k: given[k] for k in ("receipt", "render")})
updates = st.builds(
    SessionChanges,
    title=st.sampled_from((None, "t", msgspec.UNSET)),
    cwd=st.sampled_from((None, "/x", msgspec.UNSET)),
    labels=st.sampled_from(({}, {"a": "b"}, msgspec.UNSET)),
    state=st.sampled_from(("active", "active", "archived", msgspec.UNSET)),
    auto_compact=st.sampled_from((None, AutoCompact(1000), msgspec.UNSET)),
)
endings = st.tuples(
    st.sampled_from(OPERATION_IDS),
    st.sampled_from(("failed", "cancelled", "skipped")),
    st.just(b"{}"),
    st.sampled_from(({}, {"reason": "r"})),
)


NO_OPTIONS: st.SearchStrategy[dict[str, Any]] = st.just({})


def changes_by(
    method: str,
    arguments: st.SearchStrategy[tuple[Any, ...]],
    options: st.SearchStrategy[dict[str, Any]] = NO_OPTIONS,
) -> st.SearchStrategy[Change]:
    return st.builds(Change, st.just(method), arguments, options)


creates = changes_by(
    "create",
    st.tuples(st.builds(NewSession, session_ids), st.lists(items, max_size=2)),
    options_of_create,
)
forks = changes_by(
    "create",
    st.tuples(st.builds(NewSession, session_ids, parent=st.none() | st.just(Parent("s", 1)))),
    st.fixed_dictionaries(
        {
            "history": st.lists(st.integers(1, 9), max_size=3).map(lambda ids: history_of(ids, 10)),
            "receipt": st.none() | receipts,
            "render": st.just(render),
        }
    ),
)
deletes = changes_by("delete", st.tuples(session_ids), options)
others = st.one_of(
    changes_by("append", st.tuples(session_ids, st.lists(items, min_size=1, max_size=3)), options),
    changes_by("update", st.tuples(session_ids, updates), options),
    changes_by("begin", st.tuples(session_ids, receipts)),
    changes_by("end", endings),
    changes_by("keep", st.tuples(session_ids, receipts), st.just({"render": render})),
)
replacements = st.builds(
    Replace,
    session_ids,
    st.sampled_from(("compaction", "compaction", "restore", "rewind")),
    st.sampled_from(OPERATION_IDS),
    # Not a delete: the caller sees to it that the archived session stays.
    st.lists(others, max_size=1),
    st.lists(st.integers(1, 9), max_size=3),
    st.none() | receipts,
)
steps_of_a_program = st.builds(
    Step,
    st.integers(0, 5),
    st.none() | replacements,
    st.lists(st.one_of(others, creates, forks, deletes), max_size=4),
)
FIRST = Step(0, None, [Change("create", (NewSession("s"), [NewItem(b"{}", 1, ("b",))]))])


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(steps_of_a_program, max_size=12))
async def test_a_store_does_as_the_specification_does(
    open_new: Callable[[], AbstractAsyncContextManager[Store]],
    advance: Callable[[int], int],
    look: Callable[..., Awaitable[dict[str, object]]],
    steps: list[Step],
) -> None:
    seen: list[object] = []
    began_ms = advance(0)
    for opened in (open_memory_store(now_ms=lambda: advance(0)), open_new()):
        async with opened as store:
            outcomes = await run(store, [FIRST, *steps], advance)
            seen.append((outcomes, await look(store, *OPERATION_IDS)))
        advance(began_ms - advance(0))
    assert seen[0] == seen[1]
