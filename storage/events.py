"""The body of an event: what a notification says, apart from the subscription that it goes to.

PROTOCOL.md §4 has the members.
"""

from collections.abc import Mapping

import msgspec

from recapd.storage.entry import encode_time

_encode = msgspec.json.Encoder().encode


def event_body(
    session_id: str,
    seq: int,
    revision: int,
    generation: int,
    at_ms: int,
    operation_id: str | None,
    members: Mapping[str, object],
) -> bytes:
    """A JSON object, `members` last.

    Sequence numbers of a session have no gaps, so `prev_seq` is `seq` - 1.
    """
    body: dict[str, object] = {
        "session_id": session_id,
        "seq": seq,
        "prev_seq": seq - 1,
        "revision": revision,
        "generation": generation,
        "at": encode_time(at_ms),
    }
    if operation_id is not None:
        body["operation_id"] = operation_id
    return _encode({**body, **members})
