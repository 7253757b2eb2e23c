"""What the drills print, and what they write into docs/internals/reliability.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.drills.play import Result
from tests.drills.soak import SoakResult

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "reliability.md"
_VARIANTS = [(timed, workers) for workers in (1, 3) for timed in (True, False)]


def line(result: Result) -> str:
    """One line of the table as it is printed: cell, outcome, seconds until the last rank heard, error, ranks."""
    heard = "" if result.heard is None else f"{result.heard:.3f} s"
    ranks = ", ".join(map(str, result.named))
    outcome = "hangs" if result.hung else "FAILED" if result.failure else "skipped" if result.skipped else "ok"
    shown = f"{outcome:6}  {result.cell.name:78}  {heard:>9}  {result.error:21}  {ranks}"
    return "\n        ".join([shown.rstrip(), *([result.skipped] * bool(result.skipped)), *result.notes])


def summary(results: Sequence[Result]) -> str:
    failed = [result for result in results if result.failure]
    wrong = sum(" is wrong: " in result.failure for result in results)
    hangs = sum(result.hung for result in results)
    seconds = sum(result.seconds for result in results)
    late = max((result.late for result in results), default=0.0)
    reasons = sorted({result.skipped for result in results if result.skipped})
    skipped = f", {sum(bool(r.skipped) for r in results)} skipped ({'; '.join(reasons)})" if reasons else ""
    return (
        f"{len(results)} cells in {seconds / 60:.1f} minutes: {len(failed)} not as promised, {hangs} hangs, "
        f"{wrong} with wrong results{skipped}. This machine woke its threads up to {late * 1000:.0f} ms late."
    )


def write_cells(results: Sequence[Result]) -> None:
    """Puts the tables into the page, between their marks."""
    _write("drills", tables(results))


def write_soaks(soaks: Sequence[SoakResult]) -> None:
    """The same with what became of the soaks."""
    _write("soaks", "### Soak\n\n" + "\n\n".join(map(str, soaks)) + "\n")


def _write(part: str, text: str) -> None:
    marked = re.compile(rf"(<!-- {part} -->\n).*(<!-- end of {part} -->)", re.DOTALL)
    fresh, found = marked.subn(lambda marks: f"{marks[1]}\n{text}\n{marks[2]}", PAGE.read_text())
    assert found == 1, f"{PAGE} has no place for {part}"
    PAGE.write_text(fresh)


def tables(results: Sequence[Result]) -> str:
    failed = [result for result in results if result.failure]
    parts = [summary(results)]
    if failed:
        parts.append("Not as promised:")
        parts.append("\n".join(f"- {result.cell.name}: {_first_line(result)}" for result in failed))
    parts += ["### Faults", _faults([result for result in results if result.cell.family == "faults"])]
    parts += ["### Ranks that differ", _mismatches([r for r in results if r.cell.family == "mismatches"])]
    parts += ["### Endurance", _endurance([r for r in results if r.cell.family == "endurance"])]
    return "\n\n".join(parts) + "\n"


def _first_line(result: Result) -> str:
    text = result.failure.splitlines()[0]
    return text if len(text) < 300 else f"{text[:300]} …"


def _faults(results: Iterable[Result]) -> str:
    rows: dict[tuple[str, str], dict[tuple[bool, int], Result]] = {}
    for result in results:
        cell = result.cell
        rows.setdefault((cell.target, cell.fault), {})[bool(cell.deadline), cell.workers] = result
    titles = [f"{n} worker{'s' * (n > 1)}, {'timeout' if timed else 'no timeout'}" for timed, n in _VARIANTS]
    table = [f"| who | what happens | {' | '.join(titles)} |", "|---|---|---|---|---|---|"]
    for (target, fault), found in sorted(rows.items(), key=lambda row: row[0][0]):
        shown = [_outcome(found[variant]) if variant in found else "" for variant in _VARIANTS]
        table.append(f"| {target} | {fault} | {' | '.join(shown)} |")
    return "\n".join(table)


def _outcome(result: Result) -> str:
    """`Unavailable, rank 2, 0.012 s`"""
    if result.failure:
        return "**hangs**" if result.hung else "**not as promised**"
    if result.skipped:
        return "skipped"
    parts = [result.error.removesuffix("Error")]
    if result.named:
        parts.append(f"rank{'s' * (len(result.named) > 1)} {', '.join(map(str, result.named))}")
    if result.heard is not None:
        parts.append(f"{result.heard:.3f} s")
    return ", ".join(parts)


def _mismatches(results: Sequence[Result]) -> str:
    collectives = list(dict.fromkeys(result.cell.target for result in results))
    fields = list(dict.fromkeys(result.cell.fault for result in results))
    cells = {(r.cell.fault, r.cell.target, r.cell.workers): r for r in results}
    table = [f"| what differs | {' | '.join(collectives)} |", f"|---|{'---|' * len(collectives)}"]
    for field in fields:
        row = []
        for collective in collectives:
            found = [cells[field, collective, n] for n in (1, 3) if (field, collective, n) in cells]
            row.append(" / ".join("**failed**" if r.failure else f"{r.heard or 0.0:.3f} s" for r in found))
        table.append(f"| {field} | {' | '.join(row)} |")
    return "\n".join(table)


def _endurance(results: Iterable[Result]) -> str:
    lines = []
    for result in results:
        state = "not as promised" if result.failure else "as promised"
        lines.append(f"- **{result.cell.fault}** ({result.cell.target}): {state}, {result.seconds:.0f} s")
        lines += [f"  - {note}" for note in result.notes]
    return "\n".join(lines)
