"""`session.verify`: is what is stored what was written?"""

import hashlib
from collections.abc import AsyncGenerator, Callable

from recapd.daemon.connection import Call
from recapd.protocol import messages as m
from recapd.protocol.errors import Expectation, InvalidParams
from recapd.storage.errors import UnknownSession
from recapd.storage.store import Query, Store

_FAULTS_MAX = 1000  # told of
_PAGE = 200  # sessions


async def verify(call: Call, params: m.VerifyParams) -> m.VerifyResult:
    share = params.share
    if share is not None and share.part > share.of:
        raise InvalidParams(
            errors=[Expectation(path="$.params.share.part", expected="at most `of`")]
        )
    call.release()  # it may take long, and changes nothing
    store = call.service.store
    checked = size_bytes = 0
    faults: list[m.Fault] = []
    total = 0
    async for session_id in _session_ids(store, params.session_id, call.principal.only):
        try:
            found = await store.verify(session_id, read=_chosen(session_id, params))
        except UnknownSession:
            if params.session_id is not None:
                raise
            continue  # it was deleted meanwhile
        checked += found.histories
        size_bytes += found.bytes
        total += len(found.faults)
        room = _FAULTS_MAX - len(faults)
        faults += [m.Fault(one.session_id, one.revision, one.kind) for one in found.faults[:room]]
    return m.VerifyResult(checked, size_bytes, faults, total)


def _chosen(session_id: str, params: m.VerifyParams) -> Callable[[int], bool]:
    """Which revisions of a session are read."""

    def chosen(revision: int) -> bool:
        if params.share is None:
            return params.read_data
        digest = hashlib.sha256(f"{session_id} {revision}".encode()).digest()
        return int.from_bytes(digest[:8]) % params.share.of == params.share.part - 1

    return chosen


async def _session_ids(
    store: Store, one: str | None, only: tuple[str, ...] | None
) -> AsyncGenerator[str]:
    """The one, or all (of `only`), in pages."""
    if one is not None:
        yield one
        return
    after: tuple[int | str, str] | None = None
    while True:
        query = Query(sort="session_id", order="asc", limit=_PAGE, after=after, only=only)
        sessions = await store.sessions(query)
        for session in sessions:
            yield session.session_id
        if len(sessions) < _PAGE:
            return
        after = sessions[-1].session_id, sessions[-1].session_id
