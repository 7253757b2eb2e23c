"""Blocks: every value has one place, arrays begin blocks, and what would not be smaller is left as it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runtime.engine.compile.test_program import floats, topology

from collectived_proto.types import Barrier, Collective, Compression, ReduceOp, ReduceScatter, Tier
from collectived_runtime.engine.compile.blocks import (
    BLOCK_VALUES,
    BlockLayout,
    lay_out,
    lay_out_packs,
    lay_out_shares,
)
from collectived_runtime.engine.compile.program import compile_program, count_tasks
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.packing import layout

lengths = st.lists(st.integers(0, 5 * BLOCK_VALUES), min_size=1, max_size=8)


def neighbours(counts: list[int]) -> list[Span]:
    stops = np.cumsum(counts).tolist()
    return [Span(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def places(blocks: BlockLayout) -> dict[int, int]:
    """By value of the vector, its place in blocks."""
    return {run.start + at: run.target + at for run in blocks.runs for at in range(run.stop - run.start)}


@given(counts=lengths)
def test_each_array_begins_a_block_and_every_value_has_a_place_of_its_own(counts: list[int]) -> None:
    spans = neighbours(counts)
    blocks = lay_out(Compression.INT8, spans)
    found = places(blocks)
    assert sorted(found) == list(range(sum(counts)))
    assert len(set(found.values())) == len(found)
    assert all(found[span.start] % BLOCK_VALUES == 0 for span in spans if len(span))
    assert len(blocks.blocks) == sum(-(-count // BLOCK_VALUES) for count in counts)
    assert blocks.is_plain == all(value == place for value, place in found.items()) or sum(counts) % BLOCK_VALUES
    for span in spans:
        inside = blocks.to_blocks(span)
        assert {found[at] // BLOCK_VALUES for at in range(span.start, span.stop)} == set(
            range(inside.start, inside.stop)
        )


@given(counts=lengths, cuts=st.lists(st.integers(0, 60), max_size=3))
def test_a_part_has_what_the_whole_has_in_these_blocks(counts: list[int], cuts: list[int]) -> None:
    blocks = lay_out(Compression.INT8, neighbours(counts))
    edges = sorted({0, len(blocks.blocks), *(cut for cut in cuts if cut < len(blocks.blocks))})
    whole: dict[int, int] = {}
    for first, last in zip(edges, edges[1:], strict=False):
        part = blocks.select(Span(first, last))
        inside = places(part)
        assert all(first <= place // BLOCK_VALUES < last for place in inside.values())
        assert part.values == (Span(min(inside), max(inside) + 1) if inside else Span(0, 0))
        whole |= inside
    assert whole == places(blocks)


def test_what_is_small_or_would_not_be_smaller_travels_as_it_is() -> None:
    def of(*counts: int, workers: int = 2) -> BlockLayout | None:
        asked = floats(*counts, compression=Compression.INT8)
        (found,) = lay_out_packs(asked, topology(*[1] * workers), layout(asked, 0))
        return found

    assert of(1023) is None
    assert of(1024) is not None
    assert of(*[8] * 1000) is None, "a thousand blocks of 132 bytes for 32,000 bytes"
    assert of(1 << 20, workers=1) is None
    assert lay_out_packs(floats(1 << 20), topology(1, 1), layout(floats(1 << 20), 0)) == (None,)
    nothing = Collective(Barrier(), "", (), compression=Compression.INT8)
    assert lay_out_packs(nothing, topology(1, 1), layout(nothing, 0)) == ()
    assert lay_out_shares(floats(1 << 20), topology(1, 1), [Span(0, 9000), Span(9000, 1 << 20)]) is None


@pytest.mark.parametrize("shards", [1, 3])
def test_the_tasks_of_a_pack_share_its_blocks(shards: int) -> None:
    spec = (Tier("ring", shards),)
    asked = floats(100_003, 17, 5000, compression=Compression.FLOAT8, all_reduce_spec=spec)
    for me in range(3):
        where = topology(1, 2, 1, me=me)
        program = compile_program(asked, where)
        assert len(program.tasks) == shards == count_tasks(asked, where, program.layout)
        found: dict[int, int] = {}
        for task in program.tasks:
            assert task.blocks is not None
            assert task.reason.endswith("compressed to float8")
            found |= places(task.blocks)
        assert sorted(found) == list(range(105_020))
        assert program.tasks[0].block_count == 782 + 1 + 40


def test_each_worker_gets_whole_blocks_of_a_reduce_scatter() -> None:
    asked = floats(10_001, operation=ReduceScatter(ReduceOp.SUM), compression=Compression.INT8)
    for me in range(2):
        (task,) = compile_program(asked, topology(2, 1, me=me)).tasks
        assert task.blocks is not None and task.partition is not None
        first, second = task.partition.shares
        assert task.blocks.to_blocks(first) == Span(0, 53)
        assert task.blocks.to_blocks(second) == Span(53, 53 + 27)


def test_the_plans_of_workers_that_compress_otherwise_differ_in_their_hash() -> None:
    for operation in (None, ReduceScatter(ReduceOp.SUM)):
        given_ = {} if operation is None else {"operation": operation}
        hashes = {
            compile_program(floats(10_000, compression=one, **given_), topology(1, 1)).tasks[0].plan_hash
            for one in Compression
        }
        assert len(hashes) == len(Compression)
