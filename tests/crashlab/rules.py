"""What holds of the order of the calls in a recorded run, wherever the power is cut."""

from collections import Counter
from collections.abc import Iterator
from typing import Final

from tests.crashlab.disk import NEVER, Disk, Step
from tests.crashlab.shim import Kind

_LOG: Final = "store.db-wal"
_SUFFIX: Final = ".jsonl.zst"


def first_told(disk: Disk) -> dict[int, int]:
    """The index of the first call that says of a change that it is made."""
    told: dict[int, int] = {}
    for index, text in disk.marks:
        if text.startswith("A "):
            told.setdefault(int(text[2:]), index)
    return told


def broken_order(disk: Disk) -> Iterator[str]:
    """PROMISES.md D3: archive, its sync, its name, its folder's sync, log, its sync, the news."""
    told = first_told(disk)
    begun = {int(text[2:]): index for index, text in disk.marks if text.startswith("B ")}
    for number, index in told.items():
        for step in disk.pending(index):
            if disk.label(step).endswith(_LOG):
                yield f"change {number} is told before the log is synced"
    log = [step for step in disk.steps if disk.label(step).endswith(_LOG) and step.kind == "write"]
    for name in _archive_names(disk):
        written = [step for step in disk.steps if step.node == name.child]
        if any(step.durable_at > name.call for step in written):
            yield f"{name.name} has its name before its bytes are synced"
        if any(name.call < step.call <= name.durable_at for step in log):
            yield f"{name.name} is spoken of in the log before its name is synced"
        for number, index in begun.items():
            if index < name.call < told[number]:
                yield f"{name.name} has its name after change {number} was handed over"


def _archive_names(disk: Disk) -> list[Step]:
    return [
        step
        for step in disk.steps
        if step.kind == "name" and step.child and step.name.endswith(_SUFFIX)
    ]


def syncs(disk: Disk) -> dict[str, list[int]]:
    """PROMISES.md D10: how many syncs there are between the last byte of a change's commit and the
    news of it, and how many the file and the folder of each archive have.
    """
    synced = [index for index, call in enumerate(disk.calls) if call.kind is Kind.SYNC]
    written = [step.call for step in disk.steps if disk.label(step).endswith(_LOG)]
    commits: list[int] = []
    for told in first_told(disk).values():
        last = max(call for call in written if call < told)
        commits.append(sum(last < index < told for index in synced))
    saved = Counter(step.durable_at for step in disk.steps if step.durable_at != NEVER)
    archives: list[int] = []
    for name in _archive_names(disk):
        bytes_saved = {step.durable_at for step in disk.steps if step.node == name.child}
        archives.append(len({*bytes_saved, name.durable_at} & saved.keys()))
    return {"commits": commits, "archives": archives}
