"""From recorded calls to what a power cut could leave on the disk, after the manner of ALICE
(Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014).

Little is assumed of the file system, less than ext4, xfs and btrfs do:

* what was written to a file is durable from a successful fsync of that file on;
* what was done to a folder (a name made, changed, removed) from one of that folder on: the fsync of
  a new file does not save its name;
* anything else may have arrived or not, in any order and combination;
* a write may be torn at multiples of 512 and 4096 bytes; a file may have its new size, and zeros or
  junk in place of its new bytes;
* of a rename one half may have arrived;
* what a failed fsync was to save never becomes durable by a later one.

Not covered: a tear within 512 bytes, rot of what was synced, a drive that lies.

SQLite's `-shm` is a mapping that no recorder sees. It outlives no process, so it is left out here
and whoever opens a state makes up one.
"""

import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Final, Literal

from tests.crashlab.shim import Call, Kind

NEVER: Final = 1 << 60
_IGNORED: Final = "-shm"
_JUNK: Final = b"\xa5\x5a\xfe\x01"
_CACHED: Final = 4096

Tree = list[tuple[str, bytes | None]]
"""Relative paths, parents first, with a file's bytes; None: a folder."""


@dataclass(slots=True)
class Step:
    """One thing done to one file or folder, and when it was durable."""

    number: int
    call: int  # its index; -1: it was there before
    node: int
    kind: Literal["write", "truncate", "name"]
    offset: int = 0
    data: bytes = b""
    name: str = ""
    child: int | None = None  # None: the name is removed
    rename: int = 0  # the two halves of one have the same number
    durable_at: int = NEVER  # index of the call that saved it


@dataclass(frozen=True, slots=True)
class Loss:
    """What of a moment's steps did not arrive. `torn`: of a write only these ranges did."""

    missing: frozenset[int]
    torn: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()
    fill: Literal["zeros", "junk"] = "zeros"
    why: str = ""


@dataclass(slots=True)
class _Node:
    is_folder: bool
    label: str
    size: int = 0
    steps: list[Step] = field(default_factory=list[Step])


class Disk:
    """The steps of a recorded run, below `root`, on top of `initial`, which is durable."""

    def __init__(self, calls: Sequence[Call], root: Path, initial: Tree = ()) -> None:  # type: ignore[assignment]
        self.calls = calls
        self.steps: list[Step] = []
        self.marks: list[tuple[int, str]] = []  # index of the call, text
        self._root = os.fspath(root)
        self._nodes = [_Node(True, ".")]
        self._names: dict[tuple[int, str], int] = {}
        self._open: dict[int, int] = {}
        self._lost: set[int] = set()
        self._renames = 0
        self._contents: dict[object, tuple[bytes, bytes]] = {}
        for path, data in initial:
            self._put_initial(path, data)
        for index, call in enumerate(calls):
            if call.kind is Kind.MARK:
                self.marks.append((index, call.data.decode()))
            elif call.kind is Kind.SYNC:
                self._sync(index, call)
            elif call.ok:
                self._replay(index, call)

    # Replaying the run.

    def _put_initial(self, path: str, data: bytes | None) -> None:
        pure = PurePath(path)
        folder = self._find(f"{self._root}/{pure.parent}")
        node = self._make(-1, folder, pure.name, is_folder=data is None)
        if data:
            self._add(-1, node, "write", data=data)
            self._nodes[node].size = len(data)
        for step in self.steps:
            step.durable_at = -1

    def _replay(self, index: int, call: Call) -> None:
        match call.kind:
            case Kind.OPEN:
                node = self._look(call.path)
                if node is None:
                    folder, name = self._place(call.path)
                    node = self._make(index, folder, name, is_folder=False)
                elif call.size & os.O_TRUNC and self._nodes[node].size:
                    self._truncate(index, node, 0)
                self._open[call.descriptor] = node
            case Kind.CLOSE:
                self._open.pop(call.descriptor, None)
            case Kind.WRITE if call.data:
                node = self._open[call.descriptor]
                self._add(index, node, "write", offset=call.offset, data=call.data)
                end = call.offset + len(call.data)
                self._nodes[node].size = max(self._nodes[node].size, end)
            case Kind.TRUNCATE:
                self._truncate(index, self._open[call.descriptor], call.size)
            case Kind.MKDIR:
                self._make(index, *self._place(call.path), is_folder=True)
            case Kind.UNLINK:
                folder, name = self._place(call.path)
                del self._names[folder, name]
                self._add(index, folder, "name", name=name)
            case Kind.RENAME | Kind.LINK:
                node = self._find(call.path)
                folder, name = self._place(call.to)
                self._renames += 1
                self._names[folder, name] = node
                self._add(index, folder, "name", name=name, child=node, rename=self._renames)
                if call.kind is Kind.RENAME:
                    folder, name = self._place(call.path)
                    del self._names[folder, name]
                    self._add(index, folder, "name", name=name, rename=self._renames)
            case _:
                pass

    def _sync(self, index: int, call: Call) -> None:
        for step in self._nodes[self._open[call.descriptor]].steps:
            if step.durable_at == NEVER and step.number not in self._lost:
                if call.ok:
                    step.durable_at = index
                elif step.kind != "name":  # a journal that cannot be written stops the file system
                    self._lost.add(step.number)

    def _look(self, path: str) -> int | None:
        node: int | None = 0
        relative = os.path.relpath(path, self._root)
        for name in [] if relative == "." else relative.split("/"):
            node = None if node is None else self._names.get((node, name))
        return node

    def _find(self, path: str) -> int:
        node = self._look(path)
        if node is None:
            raise ValueError(f"{path} is used and was never made")
        return node

    def _place(self, path: str) -> tuple[int, str]:
        return self._find(os.path.dirname(path)), os.path.basename(path)

    def _make(self, index: int, folder: int, name: str, *, is_folder: bool) -> int:
        label = f"{self._nodes[folder].label}/{name}" if folder else name
        self._nodes.append(_Node(is_folder, label))
        node = len(self._nodes) - 1
        self._names[folder, name] = node
        self._add(index, folder, "name", name=name, child=node)
        return node

    def _truncate(self, index: int, node: int, size: int) -> None:
        self._add(index, node, "truncate", offset=size)
        self._nodes[node].size = size

    def _add(
        self,
        index: int,
        node: int,
        kind: Literal["write", "truncate", "name"],
        *,
        offset: int = 0,
        data: bytes = b"",
        name: str = "",
        child: int | None = None,
        rename: int = 0,
    ) -> None:
        step = Step(len(self.steps), index, node, kind, offset, data, name, child, rename)
        self.steps.append(step)
        self._nodes[node].steps.append(step)

    # What a cut at a moment can leave.

    def label(self, step: Step) -> str:
        """The file or folder that a step was done to."""
        return self._nodes[step.node].label

    def moments(self) -> list[int]:
        """How many calls were made before each cut that tells something new."""
        return [0] + [
            index + 1 for index, call in enumerate(self.calls) if call.kind is not Kind.CLOSE
        ]

    def pending(self, moment: int) -> list[Step]:
        """What was done before a moment and is not durable at it."""
        return [
            step
            for step in self.steps
            if step.call < moment <= step.durable_at and not self._ignored(step)
        ]

    def _ignored(self, step: Step) -> bool:
        child = step.child is not None and self._nodes[step.child].label
        return _IGNORED in (self._nodes[step.node].label[-4:], str(child)[-4:])

    def losses(
        self, moment: int, rng: random.Random, *, every: int, samples: int
    ) -> Iterator[Loss]:
        """What a cut may cost: each subset where `every` steps or fewer are pending, and beyond
        that the telling ones and `samples` random ones.
        """
        pending = self.pending(moment)
        numbers = [step.number for step in pending]
        whole: frozenset[int] = frozenset()
        nothing = frozenset(numbers)
        yield Loss(whole, why="all arrived")
        if not pending:
            return
        yield Loss(nothing, why="only what was synced")
        for count in range(1, len(numbers)):
            yield Loss(frozenset(numbers[count:]), why=f"the first {count} arrived")
            yield Loss(frozenset(numbers[:count]), why=f"the first {count} did not arrive")
        for number in numbers:
            yield Loss(frozenset([number]), why="one is missing")
            yield Loss(nothing - {number}, why="one alone")
        for node in sorted({step.node for step in pending}):
            own = frozenset(step.number for step in pending if step.node == node)
            yield Loss(own, why=f"nothing of {self._nodes[node].label}")
            yield Loss(nothing - own, why=f"{self._nodes[node].label} alone")
        for kind in ("name", "truncate"):
            some = frozenset(step.number for step in pending if step.kind == kind)
            if some:
                yield Loss(some, why=f"no {kind}")
                yield Loss(nothing - some, why=f"every {kind} and nothing else")
        for step in pending:
            if step.rename:
                yield Loss(frozenset([step.number]), why="half a rename")
        for index, step in enumerate(pending):
            if step.kind == "write":
                yield from _tears(step, frozenset(numbers[index + 1 :]))
        if len(numbers) <= every:
            for bits in range(1 << len(numbers)):
                some = frozenset(n for bit, n in enumerate(numbers) if bits >> bit & 1)
                yield Loss(some, why="a subset")
        else:
            for _ in range(samples):
                yield _random_loss(pending, rng)

    def tree(self, moment: int, loss: Loss) -> tuple[bytes, Tree]:
        """A digest of what is on the disk then, and all of it."""
        tree: Tree = []
        digest = hashlib.blake2b(digest_size=16)

        def walk(folder: int, prefix: str) -> None:
            names: dict[str, int] = {}
            for step in self._nodes[folder].steps:
                if step.call >= moment:
                    break
                if step.number in loss.missing:
                    continue
                if step.child is None:
                    names.pop(step.name, None)
                else:
                    names[step.name] = step.child
            for name in sorted(names):
                path = prefix + name
                if path.endswith(_IGNORED):
                    continue
                if self._nodes[names[name]].is_folder:
                    tree.append((path, None))
                    digest.update(b"folder %b\0" % path.encode())
                    walk(names[name], f"{path}/")
                else:
                    own, data = self._content(names[name], moment, loss)
                    tree.append((path, data))
                    digest.update(b"file %b\0%b" % (path.encode(), own))

        walk(0, "")
        return digest.digest(), tree

    def _content(self, node: int, moment: int, loss: Loss) -> tuple[bytes, bytes]:
        torn = dict(loss.torn)
        arrived = [
            step
            for step in self._nodes[node].steps
            if step.call < moment and step.number not in loss.missing
        ]
        tears = tuple((step.number, torn[step.number]) for step in arrived if step.number in torn)
        key = node, tuple(step.number for step in arrived), tears, loss.fill if tears else ""
        found = self._contents.get(key)
        if found is not None:
            return found
        content = bytearray()
        for step in arrived:
            end = step.offset + len(step.data)
            had = len(content)
            content.extend(bytes(max(0, end - had)))
            if step.kind == "truncate":
                del content[end:]
            elif step.number in torn:
                if loss.fill == "junk" and had < end:
                    start = max(had, step.offset)
                    content[start:end] = (_JUNK * ((end - start) // 4 + 1))[: end - start]
                for start, stop in torn[step.number]:
                    content[step.offset + start : step.offset + stop] = step.data[start:stop]
            else:
                content[step.offset : end] = step.data
        made = hashlib.blake2b(content, digest_size=16).digest(), bytes(content)
        if len(self._contents) >= _CACHED:
            self._contents.clear()
        self._contents[key] = made
        return made

    def describe(self, moment: int, loss: Loss) -> str:
        """For whoever has to find out what went wrong."""
        call = self.calls[moment - 1] if moment else None
        did = "nothing" if call is None else f"{call.kind.name} {call.path or call.data[:40]!r}"
        missing = [self.steps[number] for number in sorted(loss.missing)]
        what = ", ".join(f"{step.kind} {step.name} in {self.label(step)}" for step in missing)
        return f"cut after call {moment} ({did}); {loss.why}; missing: {what or 'nothing'}"


def _tears(step: Step, later: frozenset[int]) -> Iterator[Loss]:
    """A torn write as the last thing that arrived, and as the only one that is not whole."""
    size = len(step.data)
    cuts: set[int] = set()
    for unit in (512, 4096):
        edges = [*range(unit - step.offset % unit, size, unit)]
        cuts |= {*edges[:2], *edges[len(edges) // 2 : len(edges) // 2 + 1], *edges[-1:]}
    for cut in sorted(cuts):
        fill: Literal["zeros", "junk"] = "junk" if cut // 512 % 2 else "zeros"
        for kept in ((0, cut), (cut, size)):
            torn = ((step.number, (kept,)),)
            yield Loss(later, torn, fill, f"torn at {cut}, and nothing later")
            yield Loss(frozenset(), torn, fill, f"torn at {cut}")
    empty = ((step.number, ()),)
    yield Loss(later, empty, "junk", "its size without its bytes, and nothing later")
    yield Loss(frozenset(), empty, "zeros", "its size without its bytes")


def _random_loss(pending: Sequence[Step], rng: random.Random) -> Loss:
    share = rng.choice((0.1, 0.5, 0.9))
    missing = frozenset(step.number for step in pending if rng.random() < share)
    torn: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for step in pending:
        size = len(step.data)
        if step.number not in missing and size > 512 and rng.random() < 0.3:
            sectors = [(start, min(start + 512, size)) for start in range(0, size, 512)]
            torn.append((step.number, tuple(one for one in sectors if rng.random() < 0.5)))
    return Loss(missing, tuple(torn), rng.choice(("zeros", "junk")), "a random loss")
