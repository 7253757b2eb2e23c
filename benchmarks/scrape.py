"""`python -m benchmarks.scrape`: the cost of scraping a worker's metrics for its collectives.

Two ranks on one worker sum four bytes again and again, beside 50 other groups, each of which is a group loop of its
own. Windows of some seconds without a scraper alternate with windows in which the worker is scraped once a second, so
that what else the machine does befalls both alike. A sum belongs to the window in which it began; those that ran while
a page was being made are looked at by themselves too. And what counting costs is timed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import timeit
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import collectived as cd
from benchmarks import conditions
from benchmarks.environments import ROOT
from benchmarks.page import write
from collectived_proto.types import AllReduce, ReduceOp
from collectived_runtime.engine.record.counters import Counters

GROUPS = 50
WINDOWS = 10  # of each kind
WINDOW_SECONDS = 3.0
EVERY_SECONDS = 1.0
PAGE = ROOT / "docs" / "operate" / "metrics.md"


Spans = list[tuple[float, float]]  # from when to when, by the monotonic clock, in seconds


@dataclass(frozen=True, slots=True)
class Times:
    """When each sum began, by the monotonic clock, and how long it took; in seconds."""

    began: NDArray[np.float64]
    took: NDArray[np.float64]

    def within(self, spans: Spans) -> NDArray[np.float64]:
        """Of the sums that began in one of these spans of time."""
        chosen = np.zeros(len(self.began), bool)
        for begin, end in spans:
            chosen |= (self.began >= begin) & (self.began < end)
        return self.took[chosen]

    def during(self, spans: Spans) -> NDArray[np.float64]:
        """Of the sums that ran at some time of these spans."""
        chosen = np.zeros(len(self.began), bool)
        for begin, end in spans:
            chosen |= (self.began < end) & (self.began + self.took > begin)
        return self.took[chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=WINDOWS)
    parser.add_argument("--write", action="store_true", help="put the table into docs/operate/metrics.md")
    parser.add_argument("--rank", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.rank)
        return
    text = f"{conditions.shown()}\n\n{table(*measure(arguments.windows))}"
    print(text)
    if arguments.write:
        write("scrape", text, PAGE)


def measure(windows: int) -> tuple[Times, Spans, Spans, Spans]:
    """Times, the windows without and with a scraper, and when each page was made."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [str(Path(sys.executable).with_name("collectived")), "launch", "--metrics", "--clients", "2", "--"]
        command += [sys.executable, "-m", "benchmarks.scrape", "--rank", name]
        launched = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        assert launched.stdout
        said: list[str] = []
        where = token = ""
        for line in launched.stdout:
            said.append(line)
            where = "".join(re.findall(r"metrics of worker 0: (\S+)", line)) or where
            token = (
                "".join(Path(path).read_text() for path in re.findall(r"metrics need the token in (\S+)", line))
                or token
            )
            if "measuring" in line:
                break
        quiet: Spans = []
        scraped: Spans = []
        pages: Spans = []
        for number in range(2 * windows):
            begin = time.monotonic()
            due = begin
            while (now := time.monotonic()) < begin + WINDOW_SECONDS:
                if number % 2 and now >= due:
                    due += EVERY_SECONDS
                    pages.append(scrape(where, token.strip()))
                else:
                    time.sleep(0.01)
            (scraped if number % 2 else quiet).append((begin, time.monotonic()))
        (folder / "over").touch()
        said.extend(launched.stdout)
        assert launched.wait() == 0, "".join(said)
        found = np.load(folder / "times.npy")
    return Times(found[0], found[1]), quiet, scraped, pages


def scrape(where: str, token: str) -> tuple[float, float]:
    """From when to when it took."""
    request = urllib.request.Request(where, headers={"Authorization": f"Bearer {token}"})
    begin = time.monotonic()
    with urllib.request.urlopen(request) as answer:
        answer.read()
    return begin, time.monotonic()


def rank(folder: Path) -> None:
    """One of the two; rank 0 holds the other groups, and its times are those that count."""
    with cd.connect() as session, session.join() as group, contextlib.ExitStack() as others:
        if group.rank == 0:
            for number in range(GROUPS):
                others.enter_context(session.join(f"other-{number}", 1)).all_reduce("sum", 1.0)
        array = session.empty((1,), np.float32)
        array[:] = 1
        for _ in range(1000):
            group.all_reduce("sum", array)
        if group.rank == 0:
            print("measuring", flush=True)
        began, took = [], []
        over = threading.Event()
        if group.rank == 0:
            threading.Thread(target=watch, args=(folder / "over", over), daemon=True).start()
        while True:
            array[0] = 1000.0 if over.is_set() else 1.0
            begin = time.monotonic()
            total = group.all_reduce("sum", array)[0]
            took.append(time.monotonic() - begin)
            began.append(begin)
            if total >= 1000:
                break
        if group.rank == 0:
            np.save(folder / "times.npy", np.array([began, took]))


def watch(path: Path, over: threading.Event) -> None:
    while not path.exists():
        time.sleep(0.2)
    over.set()


def counting() -> float:
    """The time for the counters of a group loop at the end of a collective, in seconds."""
    counters, operation = Counters(), AllReduce(ReduceOp.SUM)

    def count() -> None:
        counters.count_completed(operation, "ring", 4, 5e-5)
        counters.observe_wait(operation, 1e-5)

    return min(timeit.repeat(count, number=10_000, repeat=20)) / 10_000


def table(times: Times, quiet: Spans, scraped: Spans, pages: Spans) -> str:
    """The table that is shown. Pure, but for `counting`."""
    rows = (
        ("without scrapes", times.within(quiet)),
        ("one scrape a second", times.within(scraped)),
        ("of these, while a page was made", times.during(pages)),
    )
    lines = ["| 4 bytes, 2 clients, beside 50 groups | sums | median | 99 % |", "|---|---|---|---|"]
    lines += [
        f"| {what} | {len(took):,} | {np.median(took) * 1e6:.0f} µs | {np.percentile(took, 99) * 1e6:.0f} µs |"
        for what, took in rows
    ]
    made = np.median([end - begin for begin, end in pages])
    ratio = np.median(rows[1][1]) / np.median(rows[0][1])
    lines += [
        "",
        f"Scraped once a second the median is {ratio:.2f} times what it is otherwise. A page takes {made * 1e3:.0f} ms "
        f"to be had. The counters of a group loop at the end of a collective take {counting() * 1e6:.1f} µs.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
