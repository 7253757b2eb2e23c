"""docs/guide/algorithms.md and simulate.md: `python tests/docs/algorithms_page.py` (`make docs`) writes their figures.

What follows a line `$ collectived simulate …` in a block is its output; between the comments that name the numbers of
participants stands what the checker counts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from collectived_runtime.simulation.algorithms import TIMED_ALGORITHMS
from collectived_runtime.simulation.proof import prove
from collectived_runtime.simulation.study import SimulationSpec

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PAGES = (GUIDE / "algorithms.md", GUIDE / "simulate.md")
_COMMAND = re.compile(r"^(```console.*\n)\$ collectived (simulate.*)\n(?:(?!```)(?:.*)\n)*", re.MULTILINE)
_TRAFFIC = re.compile(r"(<!-- traffic of (.*) -->\n)[^<]*(<!-- end of traffic -->)")
_BYTES = 1 << 20


def fresh(page: str) -> str:
    """The page with figures as they are now."""
    page = _COMMAND.sub(lambda found: f"{found[1]}$ collectived {found[2]}\n{output(found[2])}", page)
    return _TRAFFIC.sub(lambda found: f"{found[1]}\n{traffic(list(map(int, found[2].split(','))))}\n{found[3]}", page)


def output(arguments: str) -> str:
    """What the command prints into a file."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    command = [sys.executable, "-m", "collectived_runtime", *arguments.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=50)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def traffic(sizes: list[int]) -> str:
    """Rounds, and what the busiest participant sends, for so many hosts with one device."""
    titles = [f"P = {size}: {what}" for size in sizes for what in ("rounds", "messages", "sent")]
    rows = [f"| algorithm | {' | '.join(titles)} |", f"|---|{'---|' * len(titles)}"]
    for name in TIMED_ALGORITHMS:
        cells = [name]
        for size in sizes:
            proof = prove(SimulationSpec((1,) * size, (_BYTES,), (name,)), name, _BYTES)
            cells += [str(proof.rounds), str(proof.messages), f"{proof.sent / _BYTES:.3g} n"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(fresh(path.read_text()))
