"""A study and its proofs as tables for a terminal. Pure: values in, what to print out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from collectived_proto.config.units import format_size
from collectived_proto.report.quantities import format_measured_rate, format_measured_time
from collectived_runtime.plan.auto import ANY_SIZE, Row
from collectived_runtime.simulation.proof import Proof
from collectived_runtime.simulation.study import AlgorithmCost, SimulationSpec, Study

_SIZE_COLUMN, _COST_COLUMN, _GAP = 10, len("12.3 ms 1.05 GB/s") + 2, 3
"""Characters of a column."""


def tables(study: Study, width: int) -> Iterator[Table | Text]:
    """Build the output for lines of that many characters: algorithms, the bound, AUTO, and where AUTO switches."""
    yield Text(heading(study.spec))
    yield Text(describe_model(study.spec), style="dim")
    for names in split_columns(study.spec.algorithms, width):
        yield Text()
        yield _times_table(study, names)
    yield Text()
    yield _auto_table(study)
    yield Text()
    yield _switch_table(study.table)


def split_columns(names: Sequence[str], width: int) -> Iterator[tuple[str, ...]]:
    """The names, as many at a time as fit beside each other."""
    together: list[str] = []
    room = width - _SIZE_COLUMN
    for name in names:
        needed = max(len(name), _COST_COLUMN) + _GAP
        if together and needed > room:
            yield tuple(together)
            together, room = [], width - _SIZE_COLUMN
        together.append(name)
        room -= needed
    yield tuple(together)


def heading(question: SimulationSpec) -> str:
    """`64 workers × 8 devices = 512 participants, 1 shard, float32`."""
    hosts = question.hosts
    workers = f"{len(hosts)} worker{'s' * (len(hosts) > 1)}"
    if min(hosts) == max(hosts):
        devices = f" × {hosts[0]} device{'s' * (hosts[0] > 1)} = {sum(hosts)}"
    else:
        devices = f", {', '.join(map(str, hosts[:16]))}{', …' * (len(hosts) > 16)} devices = {sum(hosts)}"
    participants = f" participant{'s' * (sum(hosts) > 1)}"
    return f"{workers}{devices}{participants}, {question.shards} shard{'s' * (question.shards > 1)}, float32"


def describe_model(question: SimulationSpec) -> str:
    model = question.model
    across, inside = (
        f"{format_measured_time(link.latency)}, {format_measured_rate(link.bandwidth)}"
        for link in (model.across, model.inside)
    )
    return (
        f"across hosts {across}; inside {inside}; message {format_measured_time(model.overhead)}; "
        f"fold {format_measured_rate(model.fold)}; connection {format_measured_rate(model.stream)}"
    )


def proof_table(found: Sequence[Proof]) -> Table:
    """Show what was proved, and how long it took."""
    table = _table("every participant ends with every contribution exactly once")
    for column in ("algorithm", "size", "participants", "rounds", "messages", "sent", "checked in"):
        table.add_column(column, justify="left" if column == "algorithm" else "right", no_wrap=True)
    for proof in found:
        table.add_row(
            proof.algorithm,
            format_size(proof.nbytes),
            str(proof.participants),
            str(proof.rounds),
            str(proof.messages),
            format_size(proof.sent),
            format_measured_time(proof.seconds),
        )
    table.caption = "messages, sent: of the busiest participant"
    return table


def _times_table(study: Study, names: Sequence[str]) -> Table:
    table = _table("time and bus bandwidth")
    for column in ("size", *names):
        table.add_column(column, justify="right", no_wrap=True)
    for line in study.results:
        fastest = min(figure.seconds for figure in line.costs.values())
        styles = ["bold green" if line.costs[name].seconds == fastest else "" for name in names]
        cells = [Text(_format_cost(line.costs[name]), style) for name, style in zip(names, styles, strict=True)]
        table.add_row(format_size(line.nbytes), *cells)
    return table


def _auto_table(study: Study) -> Table:
    table = _table("the choices of AUTO, and the lower bound")
    for column in ("size", "lower bound", "AUTO", "algorithm"):
        table.add_column(column, justify="left" if column == "algorithm" else "right", no_wrap=True)
    for line in study.results:
        shards = f" × {line.auto.shards} shards" if line.auto.shards > 1 else ""
        name = f"{line.auto.algorithm}{shards}"
        table.add_row(
            format_size(line.nbytes), format_measured_time(line.lower_bound), _format_cost(line.auto.cost), name
        )
    return table


def _format_cost(figure: AlgorithmCost) -> str:
    return f"{format_measured_time(figure.seconds)} {format_measured_rate(figure.bus_bandwidth):>9}"


def _switch_table(rows: Sequence[Row]) -> Table:
    table = _table("where AUTO switches")
    for column in ("up to", "algorithm", "shards", "bytes per pack"):
        table.add_column(column, justify="left" if column == "algorithm" else "right", no_wrap=True)
    for row in rows:
        limit = "any size" if row.limit == ANY_SIZE else format_size(row.limit)
        table.add_row(
            limit, row.algorithm, str(row.shards), format_size(row.bytes_per_pack) if row.bytes_per_pack else "all"
        )
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
