"""The figures of docs/internals: `python -m tests.docs.figures` (`make docs`) draws them again."""

from __future__ import annotations

from tests.docs.contents import ROOT
from tests.docs.drawing import Drawing

FOLDER = ROOT / "docs" / "internals"


def draw_architecture() -> str:
    """Processes, and what goes between them."""
    drawing = Drawing(760, 400, "A client process, the worker of its host, the coordinator and another worker")
    drawing.box(16, 16, 200, 172)
    drawing.text(28, 36, "client process", "strong")
    drawing.text(28, 52, "one per rank", "small soft")
    drawing.labelled(32, 62, 168, ["Session, Group, Work"])
    drawing.labelled(32, 98, 168, ["values, calls"])
    drawing.labelled(32, 142, 168, ["native core"], "mark")

    drawing.box(352, 16, 212, 172)
    drawing.text(364, 36, "worker", "strong")
    drawing.text(364, 52, "one daemon per host", "small soft")
    drawing.labelled(368, 62, 180, ["sessions, memory"])
    drawing.labelled(368, 98, 180, ["group loop: one thread", "per group"])
    drawing.labelled(368, 152, 180, ["native core"], "mark")

    drawing.box(16, 232, 548, 88, "mark")
    drawing.text(28, 252, "segment", "strong")
    drawing.text(28, 270, "Shared memory of the ranks of one host and their worker, one per generation of a group.")
    drawing.text(28, 288, "Ranks publish values here, fold them, and decide themselves when a call is complete.")
    drawing.text(28, 306, "Sealed memfds, never named", "small soft")

    drawing.arrow((216, 76), (352, 76), both=True)
    drawing.text(284, 70, "gRPC: describe", "small", "middle")
    drawing.arrow((216, 112), (352, 112), both=True)
    drawing.text(284, 106, "doorbell: rare events", "small", "middle")
    drawing.arrow((116, 188), (116, 232), both=True)
    drawing.text(126, 214, "values and results", "small")
    drawing.arrow((458, 188), (458, 232), both=True)
    drawing.text(450, 214, "watches; takes partial sums to other hosts", "small", "end")

    drawing.box(616, 16, 128, 122)
    drawing.text(628, 36, "coordinator", "strong")
    for number, line in enumerate(("groups, ranks,", "deadlines, verdicts")):
        drawing.text(628, 56 + 16 * number, line, "small")
    drawing.text(628, 122, "no data goes here", "small soft")
    drawing.arrow((564, 76), (616, 76), both=True)
    drawing.text(590, 70, "gRPC", "small", "middle")

    drawing.box(616, 186, 128, 122)
    drawing.text(628, 206, "other workers", "strong")
    for number, line in enumerate(("one on each host,", "with its own clients")):
        drawing.text(628, 226 + 16 * number, line, "small")
    drawing.arrow((680, 138), (680, 186), both=True)
    drawing.text(690, 166, "gRPC", "small")
    drawing.box(352, 340, 392, 44)
    drawing.text(364, 358, "links: TCP between the group loops of workers", "strong")
    drawing.text(364, 374, "each worker carries out its part of the plan", "small soft")
    drawing.arrow((590, 176), (590, 340), both=True)
    drawing.arrow((680, 308), (680, 340), both=True)
    drawing.arrow((590, 176), (564, 176))
    return drawing.svg()


def draw_collective() -> str:
    """One small all_reduce of two ranks, from top to bottom."""
    drawing = Drawing(760, 424, "The steps of one all_reduce of two ranks in their segment, in the order of time")
    columns = {"rank 0": 110, "segment": 380, "rank 1": 650}
    for name, x in columns.items():
        drawing.labelled(x - 60, 16, 120, [name], "mark" if name == "segment" else "box", "strong")
        drawing.arrow((x, 44), (x, 410), dashed=True)
    steps = [
        (68, "rank 0", "write value and record to seat 0", "small"),
        (100, "rank 0", "publish: progress of seat 0 = 1", "small"),
        (148, "rank 1", "write value and record to seat 1", "small"),
        (180, "rank 1", "publish: progress of seat 1 = 1", "small"),
    ]
    for y, source, text, kind in steps:
        middle, end = columns["segment"], columns[source]
        drawing.arrow((end, y), (middle, y))
        drawing.text((middle + end) / 2, y - 5, text, kind, "middle")
    drawing.labelled(20, 120, 180, ["sees: rank 1 is missing"], "part", "small")
    drawing.text(20, 166, "spins, then sleeps", "small soft")
    drawing.labelled(560, 200, 180, ["sees: both have come"], "part", "small")
    drawing.labelled(560, 236, 180, ["compares the contracts"], "part", "small")
    drawing.arrow((650, 288), (380, 288))
    drawing.text(515, 283, "decided: 0 → 1, by compare-and-swap", "small", "middle")
    drawing.arrow((380, 320), (110, 320))
    drawing.text(245, 315, "wakes, and reads decided = 1", "small", "middle")
    for x in (110, 650):
        drawing.labelled(x - 90, 340, 180, ["folds inputs of seats 0, 1"], "part", "small")
        drawing.labelled(x - 90, 376, 180, ["returns the same bits"], "part", "small")
    return drawing.svg()


def draw_segment() -> str:
    """What lies in a segment, and which process writes it."""
    drawing = Drawing(760, 316, "The parts of a segment: an area that all processes write, and one part per seat")
    drawing.text(16, 28, "one segment per generation of a group: one sealed memfd", "strong")
    drawing.box(16, 44, 232, 256, "mark")
    drawing.text(28, 64, "shared area", "strong")
    drawing.text(28, 80, "written by all processes", "small soft")
    bottom = drawing.labelled(28, 90, 208, ["decided: one 64-bit word"], "part")
    for number, line in enumerate(("instances that are complete,", "waiting processes, culprit, reason")):
        drawing.text(32, bottom + 16 + 14 * number, line, "small soft")
    drawing.labelled(28, 160, 208, ["limit, waiting"], "part")
    drawing.labelled(28, 196, 208, ["each seat: futex and mail"], "part")
    drawing.labelled(28, 232, 208, ["counters per 8 seats"], "part")
    for seat, x in enumerate((264, 512)):
        drawing.box(x, 44, 232, 256)
        drawing.text(x + 12, 64, f"seat {seat}", "strong")
        drawing.text(x + 12, 80, f"written by rank {seat} alone, read by all", "small soft")
        y = 90
        for lines in (
            ["progress"],
            ["record[2]: digest, deadline"],
            ["inputs, results: buffers for", "three ticks"],
            ["letters, receipts, staging"],
            ["totals"],
        ):
            y = drawing.labelled(x + 12, y, 208, lines, "part") + 8
        assert y <= 300
    return drawing.svg()


FIGURES = {"architecture": draw_architecture, "collective": draw_collective, "segment": draw_segment}


if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
