"""The figures of speed in README.md are those of docs/internals/performance.md, which `make bench` writes."""

from __future__ import annotations

import re

from tests.docs.contents import ROOT
from tests.docs.performance_chart import PAGE

README = " ".join((ROOT / "README.md").read_text().split())
TABLES = PAGE.read_text().partition("<!-- compare -->")[2].partition("<!-- end of compare -->")[0]
UNITS = {"µs": 1.0, "ms": 1e3, "s": 1e6}
FRACTIONS = {"a tenth": 0.1, "three fifths": 0.6}
SMALL = ("4 B", "1 KiB", "64 KiB", "64 x 1 KiB")
LARGE = ("16 MiB", "64 MiB")
OURS = "**collectived**, a worker per rank, TCP, ordinary arrays"


def table(title: str) -> dict[str, dict[str, str]]:
    """The rows of a table by their names, and their cells by the heads of the columns."""
    found = re.search(rf"^\| {re.escape(title)} \|.*\n\|[-:|]+\|\n(?:\|.*\n)+", TABLES, re.MULTILINE)
    assert found is not None, f"{PAGE.name} has no table of {title}"
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines()]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def microseconds(cell: str) -> float:
    number, unit = cell.split()[:2]
    return float(number) * UNITS[unit]


def ratios_to_gloo(sizes: tuple[str, ...]) -> dict[str, list[float]]:
    """By operation, how long two ranks take over TCP in times of Gloo."""
    rows = table("2 ranks")
    found = {"all_reduce": [microseconds(rows[OURS][size]) / microseconds(rows["Gloo, TCP"][size]) for size in sizes]}
    for name, cells in table("2 ranks, a worker per rank, TCP").items():
        behind = [re.search(r"\((.*)\)", cells.get(size, "")) for size in sizes]
        found[name] = [1 / float(one[1]) for one in behind if one]
    return found


def test_four_bytes_take_as_long_as_the_table_says() -> None:
    said = re.search(r"Four bytes between two ranks of one host take ([\d.]+) µs, .* Open MPI \(([\d.]+)\)", README)
    assert said, "README.md does not compare four bytes with Open MPI"
    rows = table("2 ranks")
    names = ("**collectived**, one worker, ordinary arrays", "Open MPI, shared memory")
    measured = [rows[name]["4 B"] for name in names]
    for cell, shown in zip(measured, said.groups(), strict=True):
        assert abs(microseconds(cell) - float(shown)) < 0.051, "the README rounds to a tenth"


def test_small_collectives_over_tcp_take_the_part_of_gloos_time_that_is_said() -> None:
    said = re.search(r"collectives of two ranks take (.*?) to (.*?) of Gloo's time up to 64 KiB", README)
    assert said, "README.md does not compare small collectives with Gloo"
    ratios = [one for name, several in ratios_to_gloo(SMALL).items() if name != "send_recv" for one in several]
    assert len(ratios) > 10
    assert abs(min(ratios) - FRACTIONS[said[1]]) < 0.03 and abs(max(ratios) - FRACTIONS[said[2]]) < 0.06, ratios


def test_messages_and_most_of_what_is_large_take_longer_than_gloo() -> None:
    assert "messages, and most of what moves 16 MiB or more, take longer than Gloo's" in README
    assert all(ratio > 1 for ratio in ratios_to_gloo(SMALL)["send_recv"])
    large = [ratio for several in ratios_to_gloo(LARGE).values() for ratio in several]
    assert sum(ratio > 1 for ratio in large) > len(large) / 2, large
