"""Every figure that recapd is to reach, beside its goal.

    scripts/bench [--json] [--only NAME] [--repeats N] [--quick] [--peer NAME] [--profile FOLDER]

Each figure is compared with a reference that is measured in the same run, in turn with it, since
the machine may be slow at one moment and fast at the next: `floor` is the least daemon that does
the job (`floor.py`), `commit` one FULL commit through aiosqlite, `self` recapd in another state.
Printed are medians over the repeats; `ratio` is the median of those within each repeat, and behind
it are the least and the greatest. What takes a minute is done once.

`--only` takes the name of a row or of a workload, and may be given again. `--quick` shrinks
everything, to see whether it runs. `--peer` also measures a library, in an environment that is made
for it and thrown away. `--profile` instead runs the workloads with recapd alone under pyinstrument
and leaves a page for each in that folder.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from scripts import limits, peers, workloads
from scripts.targets import Name
from scripts.workloads import QUICK, Figures, Sizes

Workload = Callable[[Name, Path, Sizes], Figures]

REPEATS: Final = 3
ONCE: Final = {"listing_more", "large", "growth", "disk"}
"""They compare recapd with itself or with a fixed number, and take long."""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure, what it is compared with, and how far it may be from it.

    `reference` is `floor` (the same figure), `self NAME` (another figure of recapd), `commit`, or
    nothing.
    """

    name: str
    unit: str
    reference: str
    of: Literal["ratio", "value"]
    sign: Literal["<=", ">="]
    bound: float

    @property
    def goal(self) -> str:
        return f"{self.of} {self.sign} {self.bound:g}"

    def met(self, value: float, ratio: float | None) -> bool:
        figure = value if self.of == "value" else ratio
        assert figure is not None  # a goal for the ratio has a reference
        return figure <= self.bound if self.sign == "<=" else figure >= self.bound


WORKLOADS: Final[dict[str, tuple[Workload, list[Row]]]] = {
    "append": (
        workloads.append,
        [
            Row("append_median", "us", "floor", "ratio", "<=", 1.5),
            Row("append_against_commit", "us", "commit", "ratio", "<=", 2),
            Row("append_p99", "us", "floor", "ratio", "<=", 2),
            Row("append_100_sessions", "1/s", "floor", "ratio", ">=", 0.5),
            Row("append_100_items", "us", "floor", "ratio", "<=", 1.5),
        ],
    ),
    "fsyncs": (
        workloads.fsyncs,
        [Row("append_fsyncs", "fsync", "floor", "value", "<=", 0.05)],
    ),
    "read": (workloads.read, [Row("read_10k", "ms", "floor", "ratio", "<=", 1.5)]),
    "listing": (workloads.listing, [Row("list_10k", "ms", "floor", "ratio", "<=", 2)]),
    "listing_more": (
        workloads.listing_more,
        # "no dearer": what is measured twice differs by a few parts in a hundred
        [Row("list_100k", "ms", "self list_10k_before", "ratio", "<=", 1.2)],
    ),
    "compact": (
        workloads.compact,
        [
            Row("compact_200", "ms", "floor", "ratio", "<=", 2.5),
            Row("compact_10k", "ms", "floor", "ratio", "<=", 2.5),
        ],
    ),
    "ping": (
        workloads.ping,
        [
            Row("ping", "us", "floor", "ratio", "<=", 2),
            Row("ping_pipelined", "1/s", "floor", "value", ">=", 30_000),
        ],
    ),
    "flood": (workloads.flood, [Row("flood_lost", "requests", "floor", "value", "<=", 0)]),
    "start": (
        workloads.start,
        [
            Row("start", "ms", "floor", "ratio", "<=", 1.6),
            Row("memory_idle", "MiB", "floor", "ratio", "<=", 1.6),
        ],
    ),
    "touch": (
        workloads.touch,
        [Row("memory_1000_sessions", "MiB", "floor", "value", "<=", 8)],
    ),
    "beside": (
        workloads.beside,
        [
            Row("append_beside", "us", "self append_at_rest", "ratio", "<=", 3),
            Row("stall", "ms", "floor", "value", "<=", 20),
        ],
    ),
    "large": (workloads.large, [Row("memory_300_mb", "MiB", "", "value", "<=", 150)]),
    "growth": (
        workloads.growth,
        [Row("append_long", "us", "self append_short", "ratio", "<=", 1.2)],
    ),
    "disk": (
        workloads.disk,
        [Row("disk_growth", "B/B", "self disk_before", "ratio", "<=", 1.2)],
    ),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """A row over all repeats."""

    row: Row
    values: list[float]
    references: list[float]

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def reference(self) -> float | None:
        return statistics.median(self.references) if self.references else None

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.values, self.references, strict=False)
        return [value / reference for value, reference in pairs if reference]

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool:
        return self.row.met(self.value, self.ratio)

    def as_json(self) -> dict[str, str | float | bool | None]:
        return {
            "name": self.row.name,
            "value": self.value,
            "unit": self.row.unit,
            "reference": self.reference,
            "ratio": self.ratio,
            "goal": self.row.goal,
            "met": self.met,
        }

    def as_text(self) -> str:
        against = ratio = ""
        if self.reference is not None:
            name = self.row.reference.removeprefix("self ")
            against = f"{_number(self.reference)} {name}"
        if self.ratio is not None:
            spread = f"({_number(min(self.ratios))} to {_number(max(self.ratios))})"
            ratio = f"{_number(self.ratio)} {spread}"
        spread = f"({_number(min(self.values))} to {_number(max(self.values))})"
        value = f"{_number(self.value)} {spread}"
        verdict = "met" if self.met else "MISSED"
        return (
            f"{self.row.name:22}{self.row.unit:>9}  {value:26}{against:26}{ratio:24}"
            f"{self.row.goal:18}{verdict}"
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def once(workload: Workload, name: Name, sizes: Sizes) -> Figures:
    """One run on a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="recapd-") as home:
        return workload(name, Path(home), sizes)


def profile(name: str, workload: Workload, folder: Path, sizes: Sizes) -> None:
    """Leave the pages of the daemons that the workload starts, the last one where one follows
    another on the same data."""
    with tempfile.TemporaryDirectory(prefix="recapd-") as home:
        workload("profiled", Path(home), sizes)
        for page in Path(home).rglob("profile.html"):
            where = folder / f"{name}.html"
            shutil.copy(page, where)
            print(where)


def commit_us(sizes: Sizes) -> float:
    with tempfile.TemporaryDirectory(prefix="recapd-") as home:
        return limits.commit_us(Path(home), sizes.appends)


def measure(workload: Workload, rows: list[Row], sizes: Sizes, repeats: int) -> list[Measured]:
    """All rows of a workload. A figure that it cannot have is left out, as it said itself."""
    ours: list[Figures] = []
    floor: list[Figures] = []
    commits: list[float] = []
    for _ in range(repeats):
        if any(row.reference == "floor" for row in rows):
            floor.append(once(workload, "floor", sizes))
        if any(row.reference == "commit" for row in rows):
            commits.append(commit_us(sizes))
        ours.append(once(workload, "recapd", sizes))

    def references(row: Row) -> list[float]:
        match row.reference.split():
            case ["floor"]:
                return [figures[row.name] for figures in floor]
            case ["self", other]:
                return [figures[other] for figures in ours]
            case ["commit"]:
                return commits
            case _:
                return []

    return [
        Measured(row, [figures[figure] for figures in ours], references(row))
        for row in rows
        if (figure := "append_median" if row.reference == "commit" else row.name) in ours[0]
    ]


def machine(sizes: Sizes) -> str:
    """What one thing at a time takes here."""
    with tempfile.TemporaryDirectory(prefix="recapd-") as temporary:
        home = Path(temporary)
        commit = limits.commit_us(home, sizes.appends)
        synced = limits.synced_file_us(home, sizes.appends // 5)
    echo = limits.echo_us(sizes.pings)
    return (
        f"this machine, now: one FULL commit {commit:.0f} us, one synced file {synced:.0f} us, "
        f"one socket echo {echo:.0f} us"
    )


def chosen(only: list[str]) -> dict[str, tuple[Workload, list[Row]]]:
    """The workloads with the rows that are wanted; raises KeyError for a name there is not."""
    if not only:
        return WORKLOADS
    known = {*WORKLOADS, *(row.name for _, rows in WORKLOADS.values() for row in rows)}
    for name in only:
        if name not in known:
            raise KeyError(name)
    wanted = {
        name: (workload, [row for row in rows if name in only or row.name in only])
        for name, (workload, rows) in WORKLOADS.items()
    }
    return {name: (workload, rows) for name, (workload, rows) in wanted.items() if rows}


def compare(measured: Iterable[Measured], library: str, figures: Figures) -> list[str]:
    """Recapd beside a library, where both do the work."""
    lines = [f"\n{'':22}{'unit':>9}  {'recapd':>14}{library:>18}  times as long (1/s: as many)"]
    for each in measured:
        theirs = figures.get(each.row.name)
        if theirs is not None:
            lines.append(
                f"{each.row.name:22}{each.row.unit:>9}  {_number(each.value):>14}"
                f"{_number(theirs):>18}  {_number(theirs / each.value)}"
            )
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer", action="append", default=[], choices=peers.REQUIREMENTS)
    parser.add_argument("--profile", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    try:
        wanted = chosen(options.only)
    except KeyError as error:
        parser.error(f"there is no row or workload {error.args[0]}")
    sizes = QUICK if options.quick else Sizes()
    if options.profile is not None:
        options.profile.mkdir(parents=True, exist_ok=True)
        for name, (workload, _) in wanted.items():
            profile(name, workload, options.profile, sizes)
        return

    measured: list[Measured] = []
    if not options.json:
        print(machine(sizes))
        print(f"{'':22}{'unit':>9}  {'recapd':26}{'reference':26}{'ratio':24}goal")
    for name, (workload, rows) in wanted.items():
        repeats = 1 if name in ONCE else options.repeats
        done = measure(workload, rows, sizes, repeats)
        measured += done
        if not options.json:
            print(*(each.as_text() for each in done), sep="\n", flush=True)
    libraries = {library: peers.measure(library, options.quick) for library in options.peer}
    if options.json:
        report: dict[str, object] = {"rows": [each.as_json() for each in measured]}
        if libraries:
            report["peers"] = libraries
        print(json.dumps(report))
        return
    for library, figures in libraries.items():
        print(*compare(measured, library, figures), sep="\n")
    missed = [each.row.name for each in measured if not each.met]
    print(f"\n{len(measured) - len(missed)} of {len(measured)} met", *missed, file=sys.stderr)


if __name__ == "__main__":
    main()
