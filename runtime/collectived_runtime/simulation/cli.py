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

from collectived_proto.config.units import format_size
from collectived_proto.report.progress import Progress
from collectived_runtime.plan.errors import PlanError
from collectived_runtime.simulation.arguments import SimulateOptions, parse_arguments
from collectived_runtime.simulation.plot import draw
from collectived_runtime.simulation.proof import Proof, RoundTooLarge, count_moves, prove, select_cases
from collectived_runtime.simulation.record import study_to_dict
from collectived_runtime.simulation.show import proof_table, tables
from collectived_runtime.simulation.study import SimulationSpec, Study, run_study

FAILED, USAGE, INTERRUPTED = 1, 2, 130
FILE_WIDTH = 120
"""Columns where the output is not a terminal."""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    order = parse_arguments(arguments)
    if order.plot is not None and find_spec("matplotlib") is None:
        print("collectived simulate: --plot needs matplotlib: pip install 'collectived[plot]'", file=sys.stderr)
        return USAGE
    try:
        return _run(order)
    except KeyboardInterrupt:
        return INTERRUPTED
    except RoundTooLarge as error:
        print(f"collectived simulate: --check: {error}", file=sys.stderr)
        return USAGE
    except PlanError as fault:
        print(f"collectived simulate: --check: {type(fault).__name__}: {fault}", file=sys.stderr)
        return FAILED
    except OSError as error:
        print(f"collectived simulate: {error}", file=sys.stderr)
        return FAILED


def _run(order: SimulateOptions) -> int:
    question = order.spec
    tasks = (
        [(name, nbytes, count_moves(question, name, nbytes)) for name, nbytes in select_cases(question)]
        if order.check
        else []
    )
    what = f"{len(question.algorithms)} algorithms on {sum(question.hosts):,} devices"
    with Progress("collectived simulate", what, len(question.sizes), "sizes") as progress:
        found = run_study(question, lambda nbytes: progress.advance(format_size(nbytes)))
    if not order.as_json:
        _print(found)
    if order.plot is not None:
        draw(found, order.plot)
    checked = _check(question, tasks) if order.check else None
    if order.as_json:
        print(json.dumps(study_to_dict(found, checked), indent=2))
    elif checked is not None:
        console = _console()
        console.print()
        console.print(proof_table(checked))
    return 0


def _check(question: SimulationSpec, tasks: Sequence[tuple[str, int, int]]) -> list[Proof]:
    checked: list[Proof] = []
    with Progress("collectived simulate", "checking plans", len(tasks), "plans") as progress:
        for name, nbytes, moves in tasks:
            progress.update(f"checking {moves:,} moves of {name} at {format_size(nbytes)}", len(checked), len(tasks))
            checked.append(prove(question, name, nbytes))
    return checked


def _print(found: Study) -> None:
    console = _console()
    for part in tables(found, console.width):
        console.print(part)


def _console() -> Console:
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if told else FILE_WIDTH, highlight=False)
