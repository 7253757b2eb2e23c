"""`collectived simulate`: reads the question, has it answered, shows the answer.

Exit status: 0 done, 1 a check failed or the picture could not be written, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from rich.console import Console

from collectived_runtime.plan.errors import PlanFault
from collectived_runtime.simulation.arguments import Order, read
from collectived_runtime.simulation.plot import draw
from collectived_runtime.simulation.proof import Proof, TooWide, prove, proved, work
from collectived_runtime.simulation.record import record
from collectived_runtime.simulation.show import proofs, tables
from collectived_runtime.simulation.study import Question, Study, study
from collectived_runtime.simulation.units import size

FAILED, USAGE, INTERRUPTED = 1, 2, 130
WIDTH_OF_FILES = 120
"""Columns where the output is not a terminal."""
MANY, LONG = 10_000, 2_000_000
"""Hosts times sizes to simulate, and moves to check, from which on one is told what takes so long: some ten seconds."""


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit status."""
    order = read(arguments)
    if order.plot is not None and find_spec("matplotlib") is None:
        print("collectived simulate: --plot needs matplotlib: pip install 'collectived[plot]'", file=sys.stderr)
        return USAGE
    try:
        return _answer(order)
    except KeyboardInterrupt:
        return INTERRUPTED
    except TooWide as error:
        print(f"collectived simulate: --check: {error}", file=sys.stderr)
        return USAGE
    except PlanFault as fault:
        print(f"collectived simulate: --check: {type(fault).__name__}: {fault}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"collectived simulate: {error}", file=sys.stderr)
        return FAILED


def _answer(order: Order) -> int:
    question = order.question
    tasks = [(name, nbytes, work(question, name, nbytes)) for name, nbytes in proved(question)] if order.check else []
    if len(question.hosts) * len(question.sizes) > MANY:
        what = (
            f"{len(question.algorithms)} algorithms at {len(question.sizes)} sizes on {sum(question.hosts):,} devices"
        )
        print(f"simulating {what} ...", file=sys.stderr, flush=True)
    found = study(question)
    if not order.as_json:
        _print(found)
    if order.plot is not None:
        draw(found, order.plot)
    checked = _check(question, tasks) if order.check else None
    if order.as_json:
        print(json.dumps(record(found, checked), indent=2))
    elif checked is not None:
        console = _console()
        console.print()
        console.print(proofs(checked))
    return 0


def _check(question: Question, tasks: Sequence[tuple[str, int, int]]) -> list[Proof]:
    checked = []
    for name, nbytes, moves in tasks:
        if moves > LONG:
            print(f"checking {moves:,} moves of {name} at {size(nbytes)} ...", file=sys.stderr, flush=True)
        checked.append(prove(question, name, nbytes))
    return checked


def _print(found: Study) -> None:
    console = _console()
    for part in tables(found, console.width):
        console.print(part)


def _console() -> Console:
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if told else WIDTH_OF_FILES, highlight=False)
