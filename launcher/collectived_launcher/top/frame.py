"""A screenful: how the job is, a view of it, and the keys. Pure: what is known, what was chosen; the size goes in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from collectived_launcher.top.state import KEYS, VIEWS, TopState, clamp_offset
from collectived_launcher.top.views import BAD, GOOD, PLAIN, WARN, Listing, Row, build_listing, count_rows
from collectived_proto.report.findings import Severity, StatusFinding, collect_findings
from collectived_proto.report.labels import WorkerState, rank_count, worker_state
from collectived_proto.report.phrases import format_duration, pluralize, sanitize_text
from collectived_proto.v1 import status_pb2 as pb

# Lines over the rows: how it is, views, an empty one, names of columns; and under them.
_HEADER_LINES, _FOOTER_LINES = 4, 1


@dataclass(frozen=True, slots=True)
class LatestStatus:
    """The latest answer, and what is wrong in it; `error`: why there is no newer one, since `failing_since`."""

    reply: pb.StatusReply
    findings: tuple[StatusFinding, ...]
    received_at: float
    error: str = ""
    failing_since: float = 0.0


def status_from_reply(reply: pb.StatusReply, now: float) -> LatestStatus:
    return LatestStatus(reply, tuple(collect_findings(reply)), now)


def status_after_failure(known: LatestStatus, trouble: str, now: float) -> LatestStatus:
    """The last answer stays, with why it gets old."""
    return replace(known, error=trouble, failing_since=known.failing_since if known.error else now)


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture of `width` x `height` characters at `now`, a time of the clock of `latest`; made by `make_frame`."""

    latest: LatestStatus
    state: TopState
    now: float
    width: int
    height: int
    listing: Listing

    @property
    def row_count(self) -> int:
        """Of the view, on the screen or not."""
        return len(self.listing.rows)

    @property
    def page(self) -> int:
        """Rows that certainly fit."""
        return 1 if self.listing.wraps else self._visible_rows

    @property
    def _visible_rows(self) -> int:
        return max(1, self.height - _HEADER_LINES - _FOOTER_LINES)

    @property
    def _start(self) -> int:
        return clamp_offset(self.state.offset, self.row_count, self.page)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=self.width, height=None)
        lines = [
            *console.render_lines(self._headline(), options, pad=False),
            *console.render_lines(self._view_bar(), options, pad=False),
            *console.render_lines(Text(), options, pad=False),
            *self._body(console, options),
        ]
        lines = Segment.set_shape(lines[: self.height - _FOOTER_LINES], self.width, self.height - _FOOTER_LINES)
        lines += console.render_lines(self._footer(), options, pad=False)[:_FOOTER_LINES]
        for number, line in enumerate(lines):
            if number:
                yield Segment.line()
            yield from line

    def _headline(self) -> Text:
        """The job in one line, or what is wrong with the picture."""
        line = Text("collectived top", style="bold", no_wrap=True, overflow="ellipsis", end="")
        if self.latest.error:
            silent = (
                f"no answer since {format_duration(self.now - self.latest.failing_since)}; this is "
                f"{self._age_text()} old"
            )
            return line.append(f"  {silent}: {sanitize_text(self.latest.error)}", style=f"not bold {BAD}")
        if self.state.paused:
            line.append(f"  paused: this is {self._age_text()} old", style=f"not bold {WARN}")
        return line.append(f"  {sanitize_text(_summary(self.latest.reply))}", style="not bold")

    def _age_text(self) -> str:
        return format_duration(self.now - self.latest.received_at)

    def _view_bar(self) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        many = count_rows(self.latest.reply, self.latest.findings)
        for number, view in enumerate(VIEWS, 1):
            count = many[view]
            style = "reverse" if view is self.state.view and not self.state.help else ""
            line.append(f" {number} {view.value} {count} " if count else f" {number} {view.value} ", style=style)
            line.append(" ")
        if all(finding.severity is Severity.NOTE for finding in self.latest.findings):
            line.append("all is well", style=GOOD)
        return line

    def _body(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        if self.state.help:
            return console.render_lines(_help(), options, pad=False)
        if not self.listing.rows:
            return console.render_lines(Text(self.listing.empty_text), options, pad=False)
        return console.render_lines(
            _table(self.listing, self._start, self._visible_rows, self.width), options, pad=False
        )

    def _footer(self) -> Text:
        state = self.state
        keys = f"q quit  ? help  p {'go on' if state.paused else 'pause'}  + - every {state.interval:g} s"
        if not state.help and (self._start or self.row_count > self._visible_rows):
            keys = f"{keys}  ↑↓ from row {self._start + 1} of {self.row_count}"
        return Text(keys, style="dim", no_wrap=True, overflow="ellipsis", end="")


def make_frame(known: LatestStatus, state: TopState, now: float, width: int, height: int) -> Frame:
    return Frame(known, state, now, width, height, build_listing(state.view, known.reply, known.findings))


def _summary(reply: pb.StatusReply) -> str:
    coordinator = reply.coordinator
    here = sum(worker_state(worker) is not WorkerState.LOST for worker in reply.workers)
    job = (
        f"job {coordinator.job}  up {format_duration(coordinator.uptime_seconds)}"
        if coordinator.address
        else "no coordinator"
    )
    workers = pluralize(len(reply.workers), "worker")
    if here < len(reply.workers):
        workers = f"{here} of {workers}"
    return f"{job}  {workers}  {pluralize(len(reply.groups), 'group')}  {pluralize(rank_count(reply), 'rank')}"


def _table(shown: Listing, start: int, page: int, width: int) -> Table:
    indices = [number for number, column in enumerate(shown.columns) if column.min_width <= width]
    table = Table(box=None, pad_edge=False, expand=True, padding=(0, 2, 0, 0), header_style="dim")
    for number in indices:
        column = shown.columns[number]
        table.add_column(
            column.name,
            justify="right" if column.right_aligned else "left",
            ratio=column.ratio or None,
            no_wrap=not (shown.wraps and column.ratio),
            overflow="fold" if shown.wraps else "ellipsis",
        )
    for row in shown.rows[start : start + page]:
        table.add_row(*(_cell(row, number) for number in indices))
    return table


def _cell(row: Row, number: int) -> Text:
    return Text(sanitize_text(row.cells[number]), style=row.colour or PLAIN)


def _help() -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, meaning in KEYS:
        table.add_row(key, meaning)
    return table
