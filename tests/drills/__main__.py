"""`python -m tests.drills` (`make drills`): plays the drills, prints what became of each, and keeps the tables.

The exit status is 1 if anything was not as promised. A run of all drills writes its tables into
docs/internals/reliability.md.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys

from tests.drills import report
from tests.drills.cells import ALL
from tests.drills.play import Result, Stage
from tests.drills.soak import soak

WHOLE_SOAK_MINUTES = 30
_ORDER = ("faults", "mismatches", "endurance")


def main() -> int:
    options = _parser().parse_args()
    found = [cell for cell in ALL if re.search(options.only, cell.name) and (cell.short or not options.short)]
    chosen = sorted(found, key=lambda cell: (_ORDER.index(cell.family), cell.linked, cell.apart, cell.workers))
    if options.list:
        print("\n".join(cell.name for cell in chosen))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends it: nothing is left behind
    results: list[Result] = []
    with Stage(options.seed, few=options.short) as stage:
        for cell in chosen:
            results.append(stage.play(cell))
            print(report.line(results[-1]), flush=True)
            if results[-1].failure:
                print(results[-1].failure, file=sys.stderr, flush=True)
    print(report.summary(results))
    whole = len(chosen) == len(ALL)
    if whole:
        report.write_cells(results)
    soaks = []
    for minutes, burn in _choose_soaks(options, whole):
        soaks.append(soak(minutes * 60, options.seed, burn))
        print("\n".join([*soaks[-1].violations, str(soaks[-1])]), flush=True)
    if whole and soaks:
        report.write_soaks(soaks)
    return 1 if any(result.failure for result in results) or any(soaked.violations for soaked in soaks) else 0


def _choose_soaks(options: argparse.Namespace, whole: bool) -> list[tuple[float, bool]]:
    """Minutes of each soak, and whether it runs beside burners; after all cells one of either kind."""
    minutes = options.soak if options.soak is not None else WHOLE_SOAK_MINUTES * whole
    if not minutes:
        return []
    return [(minutes, False), (minutes, True)] if whole else [(minutes, options.burn)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.drills", description=__doc__)
    parser.add_argument("--only", default="", metavar="PATTERN", help="cells whose names match this regular expression")
    parser.add_argument("--seed", type=int, default=1, help="of everything that is chosen at random")
    parser.add_argument("--list", action="store_true", help="print the names of the cells, and play none")
    parser.add_argument(
        "--soak",
        type=float,
        metavar="MINUTES",
        help=f"how long groups compute amid random faults; 0: not at all; after all cells {WHOLE_SOAK_MINUTES}, twice",
    )
    parser.add_argument(
        "--burn",
        action="store_true",
        help="soak beside niced processes that use every core; after all cells the second soak does",
    )
    parser.add_argument("--short", action="store_true", help="the short form, which is part of the tests")
    return parser


if __name__ == "__main__":
    sys.exit(main())
