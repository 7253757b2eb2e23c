"""A screenful: how the job is, a view of it, and the keys. Pure: what is known, what was chosen; the size goes in."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from collectived_launcher.top.state import KEYS, VIEWS, State, within
from collectived_launcher.top.views import BAD, GOOD, PLAIN, WARN, Listing, Row, counts, listing
from collectived_proto.hurts import Finding, Severity, findings
from collectived_proto.shown import WorkerState, rank_count, worker_state
from collectived_proto.v1 import status_pb2 as pb
from collectived_proto.wording import clean, span

_ABOVE, _BELOW = 4, 1  # lines over the rows: how it is, views, an empty one, names of columns; and under them


@dataclass(frozen=True, slots=True)
class Known:
    """
    reply: the latest answer, which came at `heard`.
    found: what hurts in it.
    trouble: why there is no newer one, since `since`; '': there is.
    """

    reply: pb.StatusReply
    found: tuple[Finding, ...]
    heard: float
    trouble: str = ""
    since: float = 0.0


def heard(reply: pb.StatusReply, now: float) -> Known:
    return Known(reply, tuple(findings(reply)), now)


def not_heard(known: Known, trouble: str, now: float) -> Known:
    """The last answer stays, with why it gets old."""
    return replace(known, trouble=trouble, since=known.since if known.trouble else now)


@dataclass(frozen=True, slots=True)
class Frame:
    """A picture of `width` x `height` characters at `now`, a time of the clock of `known`; made by `frame`."""

    known: Known
    state: State
    now: float
    width: int
    height: int
    shown: Listing

    @property
    def rows(self) -> int:
        """Of the view, on the screen or not."""
        return len(self.shown.rows)

    @property
    def page(self) -> int:
        """Rows that certainly fit."""
        return 1 if self.shown.wraps else self._room

    @property
    def _room(self) -> int:
        return max(1, self.height - _ABOVE - _BELOW)

    @property
    def _start(self) -> int:
        return within(self.state.offset, self.rows, self.page)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        options = options.update(width=self.width, height=None)
        lines = [
            *console.render_lines(self._how_it_is(), options, pad=False),
            *console.render_lines(self._views(), options, pad=False),
            *console.render_lines(Text(), options, pad=False),
            *self._body(console, options),
        ]
        lines = Segment.set_shape(lines[: self.height - _BELOW], self.width, self.height - _BELOW)
        lines += console.render_lines(self._footer(), options, pad=False)[:_BELOW]
        for number, line in enumerate(lines):
            if number:
                yield Segment.line()
            yield from line

    def _how_it_is(self) -> Text:
        """The job in one line, or what is wrong with the picture."""
        line = Text("collectived top", style="bold", no_wrap=True, overflow="ellipsis", end="")
        if self.known.trouble:
            silent = f"no answer since {span(self.now - self.known.since)}; this is {self._age()} old"
            return line.append(f"  {silent}: {clean(self.known.trouble)}", style=f"not bold {BAD}")
        if self.state.paused:
            line.append(f"  paused: this is {self._age()} old", style=f"not bold {WARN}")
        return line.append(f"  {clean(_summary(self.known.reply))}", style="not bold")

    def _age(self) -> str:
        return span(self.now - self.known.heard)

    def _views(self) -> Text:
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        many = counts(self.known.reply, self.known.found)
        for number, view in enumerate(VIEWS, 1):
            count = many[view]
            style = "reverse" if view is self.state.view and not self.state.help else ""
            line.append(f" {number} {view.value} {count} " if count else f" {number} {view.value} ", style=style)
            line.append(" ")
        if all(finding.severity is Severity.NOTE for finding in self.known.found):
            line.append("all is well", style=GOOD)
        return line

    def _body(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        if self.state.help:
            return console.render_lines(_help(), options, pad=False)
        if not self.shown.rows:
            return console.render_lines(Text(self.shown.empty), options, pad=False)
        return console.render_lines(_table(self.shown, self._start, self._room, self.width), options, pad=False)

    def _footer(self) -> Text:
        state = self.state
        keys = f"q quit  ? help  p {'go on' if state.paused else 'pause'}  + - every {state.interval:g} s"
        if not state.help and (self._start or self.rows > self._room):
            keys = f"{keys}  ↑↓ from row {self._start + 1} of {self.rows}"
        return Text(keys, style="dim", no_wrap=True, overflow="ellipsis", end="")


def frame(known: Known, state: State, now: float, width: int, height: int) -> Frame:
    return Frame(known, state, now, width, height, listing(state.view, known.reply, known.found))


def _summary(reply: pb.StatusReply) -> str:
    coordinator = reply.coordinator
    here = sum(worker_state(worker) is not WorkerState.LOST for worker in reply.workers)
    job = f"job {coordinator.job}  up {span(coordinator.uptime_seconds)}" if coordinator.address else "no coordinator"
    workers = _count(len(reply.workers), "worker")
    if here < len(reply.workers):
        workers = f"{here} of {workers}"
    return f"{job}  {workers}  {_count(len(reply.groups), 'group')}  {_count(rank_count(reply), 'rank')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _table(shown: Listing, start: int, page: int, width: int) -> Table:
    indices = [number for number, column in enumerate(shown.columns) if column.least <= width]
    table = Table(box=None, pad_edge=False, expand=True, padding=(0, 2, 0, 0), header_style="dim")
    for number in indices:
        column = shown.columns[number]
        table.add_column(
            column.name,
            justify="right" if column.right else "left",
            ratio=column.share or None,
            no_wrap=not (shown.wraps and column.share),
            overflow="fold" if shown.wraps else "ellipsis",
        )
    for row in shown.rows[start : start + page]:
        table.add_row(*(_cell(row, number) for number in indices))
    return table


def _cell(row: Row, number: int) -> Text:
    return Text(clean(row.cells[number]), style=row.colour or PLAIN)


def _help() -> Table:
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for key, meaning in KEYS:
        table.add_row(key, meaning)
    return table
