"""The command line of `collectived simulate`: text in, a question out; wrong text is a usage error that says why."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from collectived_proto.config.units import format_size, parse_size
from collectived_runtime.plan.auto import LARGEST
from collectived_runtime.plan.cost_model import LinkClass, Model
from collectived_runtime.simulation.algorithms import all_names, default_names, is_known, list_names
from collectived_runtime.simulation.study import ITEMSIZE, SimulationSpec

MAX_WORKERS, MAX_DEVICES, MAX_SHARDS = 4096, 8, 64
PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_GBIT, _MICRO, _GB = 1e9 / 8, 1e-6, 1e9
_EPILOG = """
sizes: 64KiB, a list 4B,1MiB, or a range 4B:64MiB (each four times the one before; 4B:64MiB:2 doubles), float32.

algorithms: flat over all devices: ring, halving_doubling, tree, double_tree, shuffle, one_shot; two levels:
leader/ring, lanes/halving_doubling, ... ; those of all_reduce_spec: pscpu/pscpu, nccl/xring, ...

The documentation describes them on its page Algorithms, and the model and the keys of --json on its page What an
all-reduce costs.
"""


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """The question of a simulation, and the form of its output."""

    spec: SimulationSpec
    check: bool
    as_json: bool
    plot: Path | None


def parse_arguments(arguments: list[str]) -> SimulateOptions:
    """End the process with status 2 and the reason where the arguments make no sense."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.hosts is not None and (options.workers is not None or options.devices is not None):
        parser.error("--hosts gives the devices of every worker: expected either it or --workers and --devices")
    hosts = options.hosts or (options.devices or 1,) * (options.workers or 8)
    model = Model(
        across=LinkClass(options.latency * _MICRO, options.bandwidth * _GBIT),
        inside=LinkClass(options.inside_latency * _MICRO, options.inside_bandwidth * _GBIT),
        overhead=options.overhead * _MICRO,
        fold=options.fold * _GB,
        stream=options.stream * _GBIT,
        crowd=options.crowd,
    )
    names: tuple[str, ...] = options.algorithms
    if not names or names == ("all",):
        names = all_names(hosts) if names else default_names(hosts)
    return SimulateOptions(
        SimulationSpec(hosts, options.sizes, names, model, options.shards), options.check, options.as_json, options.plot
    )


def build_parser() -> argparse.ArgumentParser:
    """The options of `collectived simulate`."""
    parser = argparse.ArgumentParser(
        prog="collectived simulate",
        description="Predict the cost of an all-reduce on hosts that need not exist, from the plans that would run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workers", type=_integer_type("workers", MAX_WORKERS), metavar="N", help="hosts (default: 8)")
    add("--devices", type=_integer_type("devices", MAX_DEVICES), metavar="D", help="devices of each (default: 1)")
    add("--hosts", type=_hosts, metavar="D,D,...", help="devices of each host, if they differ: 3,1,2")
    add("--sizes", type=_sizes, default="4B:64MiB", metavar="SIZES", help="see below (default: 4B:64MiB)")
    add("--algorithms", type=_algorithms, default=(), metavar="NAMES", help="a,b or all (default: the usual ones)")
    add(
        "--shards",
        type=_integer_type("shards", MAX_SHARDS),
        default=1,
        metavar="M",
        help="parts side by side (default: 1)",
    )
    add("--check", action="store_true", help="prove that every participant ends with every contribution exactly once")
    add("--json", action="store_true", dest="as_json", help="everything as one JSON object")
    add("--plot", type=_parse_plot_path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    costs = parser.add_argument_group("the model: what a link, a message and a fold cost")
    plain = Model()
    for option, unit, default, about in (
        ("--latency", "US", plain.across.latency / _MICRO, "between hosts, µs"),
        ("--bandwidth", "GBIT", plain.across.bandwidth / _GBIT, "of a host to others, Gbit/s each way"),
        ("--inside-latency", "US", plain.inside.latency / _MICRO, "inside a host, µs"),
        ("--inside-bandwidth", "GBIT", plain.inside.bandwidth / _GBIT, "of a device inside a host, Gbit/s each way"),
        ("--stream", "GBIT", plain.stream / _GBIT, "of one connection, Gbit/s"),
        ("--overhead", "US", plain.overhead / _MICRO, "of a message, at its sender and its receiver, µs"),
        ("--fold", "GB", plain.fold / _GB, "folded per second, GB"),
        ("--crowd", "N", plain.crowd, "workers that share a processor, where several hosts are one machine"),
    ):
        number = _float_type(zero=unit in ("US", "N"))
        costs.add_argument(option, type=number, default=default, metavar=unit, help=f"{about} (default: {default:g})")
    return parser


def _integer_type(what: str, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text) if text.isascii() and text.isdecimal() else 0
        if not 1 <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number of {what} from 1 to {most}")
        return value

    return read


def _float_type(zero: bool) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value >= 0 if zero else value > 0) or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a number {'of at least' if zero else 'above'} 0")
        return value

    return read


def _hosts(text: str) -> tuple[int, ...]:
    hosts = tuple(map(_integer_type("devices", MAX_DEVICES), text.split(",")))
    if len(hosts) > MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"{len(hosts)} hosts: expected at most {MAX_WORKERS}")
    return hosts


def _sizes(text: str) -> tuple[int, ...]:
    try:
        found = [nbytes for part in text.split(",") for nbytes in _range(part)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    for nbytes in found:
        if nbytes % ITEMSIZE or not ITEMSIZE <= nbytes <= LARGEST:
            expected = f"expected multiples of {ITEMSIZE} bytes (float32) up to {format_size(LARGEST)}"
            raise argparse.ArgumentTypeError(f"{format_size(nbytes)} in {text!r}: {expected}")
    return tuple(sorted(set(found)))


def _range(text: str) -> list[int]:
    first, *rest = text.split(":")
    if not rest:
        return [parse_size(first)]
    last, factor = rest if len(rest) == 2 else (rest[0], "4")
    if len(rest) > 2 or not factor.isascii() or not factor.isdecimal():
        raise ValueError(f"{text!r}: expected FIRST:LAST or FIRST:LAST:FACTOR, such as 4B:64MiB:2")
    at, end, times = parse_size(first), parse_size(last), int(factor)
    if not 0 < at <= end or times < 2:
        raise ValueError(f"{text!r}: expected sizes that grow, from above 0, by a factor of at least 2")
    sizes = []
    while at <= end:
        sizes.append(at)
        at *= times
    return sizes


def _algorithms(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if not is_known(name) and names != ("all",):
            raise argparse.ArgumentTypeError(
                f"{name!r} is not an algorithm: expected all, or {', '.join(list_names())}"
            )
    return names


def _parse_plot_path(text: str) -> Path:
    path = Path(text)
    if path.suffix not in PLOT_SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a file name that ends with {', '.join(PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}")
    return path
