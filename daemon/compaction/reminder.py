"""The message that a compaction leaves behind: text in a user message (PROTOCOL.md §5.3)."""

import re

import msgspec

from recapd.protocol.items import REMINDER_END, REMINDER_TAG

# More than the exact tag of PROTOCOL.md §5.1: a model reads these as the tag all the same.
_TAG = re.compile(r"<(?=\s*/?\s*system-reminder(?:[\s/>]|\Z))", re.IGNORECASE)

_encode = msgspec.json.Encoder().encode


def reminder_item(summary: str, archived_revision: int | None, evidence: str = "") -> bytes:
    """The item around `summary`, as JSON in UTF-8; `archived_revision` holds what was summarised.

    `evidence` is the block that goes beside the summary, if there is one. Nothing in the two can
    end the reminder or begin another: the `<` of such tags becomes `&lt;`.
    """
    archived = "" if archived_revision is None else f" and archived as revision {archived_revision}"
    text = "\n".join(
        (
            REMINDER_TAG,
            f"The earlier history of this session was compacted{archived}. This is its summary:",
            "",
            neutralise(summary),
            *(("", neutralise(evidence)) if evidence else ()),
            REMINDER_END,
        )
    )
    content = [{"type": "input_text", "text": text}]
    return _encode({"type": "message", "role": "user", "content": content})


def neutralise(text: str) -> str:
    """`text` without reminder tags, in any case and with white space in them; all else as it is."""
    return _TAG.sub("&lt;", text)
