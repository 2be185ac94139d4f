"""Whole histories: read page by page, and put in place of one that was archived."""

from collections.abc import AsyncGenerator, Callable
from typing import Final

from recapd.storage.errors import OutcomeUnknown
from recapd.storage.store import Receipt, Replacement, Session, Store

_PAGE_ENTRIES: Final = 2_000  # decoded in about 3 ms, so the event loop goes on between pages
_PAGE_BYTES: Final = 4 << 20


async def read_pages(
    store: Store, session_id: str, *, generation: int, entries: int, start: int = 0
) -> AsyncGenerator[list[bytes]]:
    """The lines of one generation from index `start` on, of the `entries` that it has.

    Raises what `Store.page` raises.
    """
    index: int | None = start
    while index is not None and index < entries:
        page = await store.page(
            session_id,
            generation=generation,
            start=index,
            total=entries,
            limit=_PAGE_ENTRIES,
            bytes_max=_PAGE_BYTES,
        )
        yield page.entries
        index = page.next_index


async def put_in_place(
    store: Store,
    session_id: str,
    change: Replacement,
    *,
    render: Callable[[Session], bytes],
    receipt: Receipt | None = None,
) -> Session:
    """Replace the history whose archive was just written; if that fails, remove the archive again.

    Only within the session's exclusive turn, in which nobody found `receipt` used; not to be
    cancelled. Raises what `Store.replace` raises.
    """
    try:
        replaced = await store.replace(session_id, change, receipt=receipt, render=render).wait()
    except OutcomeUnknown:
        raise  # the row may be there, so the file must stay
    except Exception:
        await store.discard_archive(session_id, change.archive.revision)
        raise
    assert isinstance(replaced, Session)  # a repetition would be of this session, and had its turn
    return replaced
