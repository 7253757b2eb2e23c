"""What is made of figures of a GPU: parts of its traffic limit, tables and goals."""

from __future__ import annotations

from benchmarks.gpu_figures import (
    DEVICE,
    NCCL,
    ONE_GPU,
    OURS,
    RAW,
    TORCH,
    Figure,
    lines,
    report,
    show_size,
    traffic_limit,
    traffic_part,
)
from benchmarks.peers import COPY, OWNED

GIB, MIB = 1 << 30, 1 << 20


def figure(place: str, ranks: int, name: str, variant: str, nbytes: int, seconds: float) -> Figure:
    return Figure.of(place, ranks, name, variant, nbytes, [seconds])


COPIED = figure(ONE_GPU, 4, DEVICE, COPY, GIB, 0.001)  # 2 GiB/ms
FIGURES = [
    COPIED,
    figure(ONE_GPU, 4, DEVICE, "fold 4", GIB, 0.0045),
    figure(ONE_GPU, 4, OURS, OWNED, 4, 50e-6),
    figure(ONE_GPU, 4, OURS, OWNED, GIB, 0.005),
    figure(ONE_GPU, 4, OURS, "PyTorch", GIB, 0.008),
    figure(NCCL, 2, OURS, OWNED, 4, 150e-6),
    figure(NCCL, 2, RAW, "", 4, 120e-6),
    figure(NCCL, 2, TORCH, "", 4, 300e-6),
    figure(NCCL, 2, OURS, OWNED, 8 * MIB, 4e-3),
    figure(NCCL, 2, RAW, "", 8 * MIB, 4e-3),
    figure(NCCL, 2, OURS, OWNED, 32 * MIB, 20e-3),
    figure(NCCL, 2, RAW, "", 32 * MIB, 18e-3),
]


def test_traffic_is_what_every_rank_reads_and_gets() -> None:
    limit = traffic_limit(FIGURES, 4)
    assert limit == 2 * GIB / 0.001 and traffic_limit(FIGURES, 2) is None
    assert traffic_part(figure(ONE_GPU, 4, OURS, OWNED, GIB, 0.008), limit) == 0.5


def test_a_figure_has_the_median_and_what_lies_around_it() -> None:
    made = Figure.of(NCCL, 2, RAW, "", 4, [float(number) for number in range(11)][::-1])
    assert (made.fastest, made.seconds, made.slowest, made.calls) == (1.0, 5.0, 9.0, 11)


def test_the_goals_are_held_to_the_arrays_and_sizes_where_they_are_missed_most() -> None:
    found = {line.what: line for line in lines(FIGURES)}
    assert len(found) == 3
    traffic = found["4 ranks of one GPU, part of the memory's traffic limit at 1 GiB"]
    assert (traffic.measured, traffic.note, traffic.met) == (0.5, "arrays of PyTorch", False)
    late = found["NCCL, 4 B: longer than raw NCCL by"]
    assert round(late.measured) == 30 and late.met
    speed = found["NCCL, from 8 MiB: raw NCCL / ours"]
    assert (round(speed.measured, 2), speed.note, speed.met) == (0.9, "32 MiB", False)


def test_the_report_has_a_table_for_each_place() -> None:
    text = report(FIGURES, "where and when", ["NCCL, CuPy: it is not installed"])
    assert text.startswith("where and when\n\nNot measured: NCCL, CuPy: it is not installed.")
    assert "| 4 ranks of one GPU | 4 B | 1 GiB |" in text
    assert "| the kernel alone |  | 4.50 ms (0.89) |" in text
    assert "| **collectived**, `session.empty` | 150 µs (0.80 / 2.00) | 4.00 ms (1.00) | 20.0 ms (0.90) |" in text
    assert "| raw NCCL | 120 µs | 4.00 ms | 18.0 ms |" in text
    assert "A copy on the GPU moves 2.15 TB/s" in text and "1 of 3 goals are met." in text


def test_a_report_of_nothing_says_so() -> None:
    assert report([], "where", ["all: no"]) == "where\n\nNot measured: all: no.\n\nNothing was measured."


def test_sizes_have_short_names() -> None:
    assert [show_size(size) for size in (4, 1 << 15, 256 * MIB, GIB)] == ["4 B", "32 KiB", "256 MiB", "1 GiB"]
