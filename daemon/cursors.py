"""Cursors: where a paged answer goes on, as text that means something to this server only.

A cursor says nothing that its holder could not ask for, and a request that brings one is authorised
like any other, so it is not signed; what does not fit the request is `cursor_invalid`.
"""

import base64
import binascii
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from recapd.protocol.errors import CursorInvalid
from recapd.protocol.messages import Format, Order, Redact

Number = Annotated[int, Meta(ge=0, le=2**53)]


class ListPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="list"):
    """Behind one session in a sorted list."""

    sort: Literal["updated_at", "created_at", "session_id"]
    order: Order
    value: Number | str
    session_id: str


class GetPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="get"):
    """Within the first `total` entries of the history of one generation, which was at `revision`
    then.
    """

    session_id: str
    created_at_ms: int  # a session made later under the same id is another
    order: Order
    revision: Number
    generation: Number
    total: Number
    index: Number


class ExportPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="export"):
    """Within an export that was begun when the session was at `generation`, with `total` entries.

    `history` counts the histories of the export; `piece` the pieces of one: its head, entries and
    foot; `offset` the bytes of a piece that were given already.
    """

    session_id: str
    created_at_ms: int
    format: Format
    redact: Redact
    full: bool  # for somebody who may see everything
    scope: Number | Literal["current", "all"]
    revision: Number
    generation: Number
    total: Number
    history: Number
    piece: Number
    offset: Number
    bytes: Number
    counts: dict[str, int]


T = TypeVar("T", ListPosition, GetPosition, ExportPosition)

# Made at import, so that a type that cannot be decoded cannot hide behind `cursor_invalid`.
_DECODERS: Final[dict[Any, msgspec.json.Decoder[Any]]] = {
    kind: msgspec.json.Decoder(kind) for kind in (ListPosition, GetPosition, ExportPosition)
}
_encode = msgspec.json.Encoder().encode


def encode(position: ListPosition | GetPosition | ExportPosition) -> str:
    return base64.urlsafe_b64encode(_encode(position)).decode()


def decode(cursor: str | None, kind: type[T]) -> T | None:
    """The position that a cursor stands for; None for none.

    Raises CursorInvalid.
    """
    if cursor is None:
        return None
    try:
        position: T = _DECODERS[kind].decode(base64.b64decode(cursor, b"-_", validate=True))
        return position
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise CursorInvalid from error
