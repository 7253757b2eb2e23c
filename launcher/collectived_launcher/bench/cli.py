"""`collectived bench`: how fast collectives are here, in a table in the manner of nccl-tests."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from collectived_launcher.quantities import ByteCount, Time
from collectived_launcher.target_options import job_option
from collectived_proto.types import DType, ReduceOp

# -P: a file random.py in the user's folder must not be taken for Python's own.
PROGRAM = (sys.executable, "-P", "-m", "collectived.bench")
OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("send_recv", "barrier"),
)
REDUCING_OPERATIONS = ("all_reduce", "reduce", "reduce_scatter")
ROOTED_OPERATIONS = ("reduce", "broadcast", "gather", "scatter")
MAX_SIZES, MAX_IN_FLIGHT = 1000, 32
EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_NON_TTY_WIDTH = 120  # columns where the output is not a terminal
_MAX_WIDTH = 1000  # more than any table needs


@click.command(short_help="Measure how fast a collective is.")
@click.argument("operation", type=click.Choice(OPERATIONS), default="all_reduce", metavar="[OPERATION]")
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="Start a new job with this many workers.")
@click.option("--clients", type=click.IntRange(min=1), metavar="N", help="Ranks per worker.  [default: 2]")
@click.option("--worker", metavar="ADDRESS", help="Measure on this running worker (unix:/path or host:port).")
@job_option
@click.option("-b", "--min-bytes", type=ByteCount(), default="4", show_default=True, help="First size.")
@click.option("-e", "--max-bytes", type=ByteCount(), default="64M", show_default=True, help="Last size.")
@click.option(
    "-f",
    "--factor",
    type=click.IntRange(min=2),
    metavar="N",
    help="Each size is this many times the last.  [default: 4]",
)
@click.option("-i", "--step-bytes", type=ByteCount(), help="Each size is this many bytes more than the last.")
@click.option(
    "-n",
    "--iterations",
    type=click.IntRange(1, 1_000_000),
    metavar="N",
    help="Per size.  [default: 0.3 s of them, at least 20]",
)
@click.option(
    "-w",
    "--warmup",
    type=click.IntRange(0, 1_000_000),
    metavar="N",
    default=10,
    show_default=True,
    help="Before those.",
)
@click.option(
    "-d",
    "--dtype",
    type=click.Choice([kind.label for kind in DType]),
    default="float32",
    show_default=True,
    metavar="DTYPE",
    help="As NumPy spells it, bfloat16 too.",
)
@click.option("-o", "--reduce-op", metavar="OP", help="sum, mean, min, max, product, band, bor, bxor.  [default: sum]")
@click.option("-r", "--root", type=click.IntRange(min=0), metavar="RANK", help="[default: 0]")
@click.option(
    "--memory",
    type=click.Choice(["worker", "own"]),
    default="worker",
    show_default=True,
    help="Inputs in arrays from session.empty, or in ordinary ones.",
)
@click.option(
    "--async",
    "in_flight",
    type=click.IntRange(0, MAX_IN_FLIGHT),
    default=0,
    metavar="N",
    help="Keep N in flight instead of blocking calls.",
)
@click.option("--timeout", type=Time(), help="Of each collective.  [default: none]")
@click.option("--check/--no-check", default=True, help="Compare every size's results with the known answer.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also draw it: .png, .svg or .pdf (needs collectived[plot]).",
)
def bench(**given: Any) -> int:
    """Measure a collective: size, time, bandwidths and wrong results.

    \b
    OPERATION: all_reduce (default), reduce, broadcast, all_gather, gather,
    scatter, reduce_scatter, all_to_all, send_recv, barrier.

    Runs as the ranks of `collectived launch -- collectived bench`, else beside the programs of your running job, else
    in a new job of 1 worker with 2 clients. Bandwidths are
    those of nccl-tests. Exit status 1 if a result was wrong.
    """
    from collectived_launcher.bench.clients import choose_target
    from collectived_launcher.bench.screen import Screen  # rich

    order, plot = make_order(given), given["plot"]
    _check_plot(plot, given["operation"])
    place = choose_target(given["workers"], given["clients"], given["worker"], given["job"], os.environ)
    if order["root"] >= place.ranks:
        raise click.UsageError(f"--root {order['root']}: expected a rank, 0 to {place.ranks - 1}")
    with Screen() as screen:
        status = place.run((*PROGRAM, json.dumps(order)), screen)
    return _show_result(screen, status, given["as_json"], plot)


def make_order(given: dict[str, Any]) -> dict[str, Any]:
    """Make the order for the ranks, as `collectived.bench` reads it.

    Raises:
        click.UsageError: options do not go together.
    """
    operation, op, root = given["operation"], given["reduce_op"], given["root"]
    if op is not None and operation not in REDUCING_OPERATIONS:
        raise click.UsageError(
            f"--reduce-op {op}: {operation} reduces nothing; expected {_join_with_or(REDUCING_OPERATIONS)}"
        )
    if root is not None and operation not in ROOTED_OPERATIONS:
        raise click.UsageError(f"--root {root}: {operation} has no root; expected {_join_with_or(ROOTED_OPERATIONS)}")
    try:
        reduce_op = ReduceOp.of(op or "sum")
    except ValueError as error:
        raise click.UsageError(f"--reduce-op: {error}") from None
    if operation in REDUCING_OPERATIONS:
        _check_reduce_dtype(reduce_op, DType[given["dtype"].upper()])
    _check_sizes(given)
    return {
        "operation": operation,
        "dtype": given["dtype"],
        "reduce_op": reduce_op.value,
        "root": root or 0,
        "min_bytes": given["min_bytes"],
        "max_bytes": given["max_bytes"],
        "factor": given["factor"] or 4,
        "step_bytes": given["step_bytes"] or 0,
        "iterations": given["iterations"] or 0,
        "warmup": given["warmup"],
        "memory": given["memory"],
        "in_flight": given["in_flight"],
        "timeout": given["timeout"] or 0.0,
        "check": given["check"],
    }


def _check_reduce_dtype(op: ReduceOp, dtype: DType) -> None:
    if dtype is DType.BOOL:
        expected = "numbers"
    elif op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) and not dtype.is_integer:
        expected = "integers"
    elif op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.is_complex:
        expected = "values that have an order"
    else:
        return
    raise click.UsageError(f"--reduce-op {op.value} --dtype {dtype.label}: expected {expected}")


def _check_sizes(given: dict[str, Any]) -> None:
    first, last, step = given["min_bytes"], given["max_bytes"], given["step_bytes"]
    if first > last:
        raise click.UsageError(f"--min-bytes {first} is more than --max-bytes {last}: expected sizes that grow")
    if step and given["factor"]:
        raise click.UsageError("--step-bytes and --factor were both given: expected one of the two")
    if step and (last - first) // step >= MAX_SIZES:
        raise click.UsageError(
            f"--step-bytes {step} gives {(last - first) // step + 1} sizes: expected at most {MAX_SIZES}"
        )


def _check_plot(plot: Path | None, operation: str) -> None:
    """Before anything is measured."""
    if plot is None:
        return
    if operation == "barrier":
        raise click.UsageError("--plot: a barrier has no sizes to draw it against; expected another operation")
    if plot.suffix not in _PLOT_SUFFIXES:
        raise click.UsageError(
            f"--plot {str(plot)!r}: expected a file name that ends with {_join_with_or(_PLOT_SUFFIXES)}"
        )
    if not plot.parent.is_dir():
        raise click.UsageError(f"--plot {str(plot)!r}: there is no folder {str(plot.parent)!r}")
    if find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'collectived[plot]'")


def _join_with_or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _show_result(screen: Any, status: int, as_json: bool, plot: Path | None) -> int:
    """Shows what there is, whole or not; returns the exit status of the command."""
    from collectived_launcher.bench.record import as_json as shown
    from collectived_launcher.bench.record import group_failures

    record = screen.record
    if record.conditions is not None:
        if as_json:
            click.echo(json.dumps(shown(record), indent=2))
        elif record.rows:
            _print_table(record)
        if plot is not None and record.rows:
            status = _draw_plot(record, plot) or status
    if status != EXIT_INTERRUPTED:
        for ranks, error, trace in group_failures(record.failures):
            who = f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}: " if ranks else ""
            click.echo(f"collectived bench: {who}{trace or error}", err=True)
    if status == 0 and record.wrong_elements:
        click.echo(f"collectived bench: {record.wrong_elements} elements of results were wrong", err=True)
        return EXIT_FAILED
    return status


def _print_table(record: Any) -> None:
    from rich.console import Console

    from collectived_launcher.bench.tables import build_table

    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if told else _NON_TTY_WIDTH, markup=False, emoji=False, highlight=False)
    found = build_table(record)
    needed = Console(width=_MAX_WIDTH).measure(found).maximum
    console.width = max(console.width, needed)  # lines that the terminal breaks are better than figures cut off
    console.print(found)


def _draw_plot(record: Any, plot: Path) -> int:
    from collectived_launcher.bench.plot import draw_plot

    try:
        draw_plot(record, plot)
    except OSError as error:
        click.echo(f"collectived bench: --plot {str(plot)!r} cannot be written: {error.strerror}", err=True)
        return EXIT_FAILED
    return 0
