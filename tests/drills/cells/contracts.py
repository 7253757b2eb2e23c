"""Ranks that differ, in every field of the contract, in every collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from collectived_proto.errors import Code

from ..cell import ALL, VICTIM, Cell
from ..cluster import STALL_SECONDS
from ..history import AT_ONCE_SECONDS
from ..scene import Scene

COLLECTIVES = {
    "all_reduce": "all_reduce({op}, {value}, {options})",
    "reduce": "reduce({op}, {value}, {root}, {options})",
    "broadcast": "broadcast({value}, {root}, {options})",
    "barrier": "barrier({options})",
    "all_gather": "all_gather({value}, {axis}, {options})",
    "gather": "gather({value}, {root}, {axis}, {options})",
    "scatter": "scatter({pieces}, {root}, {axis}, None, {options})",
    "reduce_scatter": "reduce_scatter({op}, {value}, {axis}, {sizes}, {options})",
    "all_to_all": "all_to_all({value}, {axis}, {sizes}, {options})",
}
USUAL = {
    "op": "'sum'",
    "value": "np.ones((4, 8))",
    "pieces": "np.ones((4, 8))",  # only the root's count
    "root": "0",
    "axis": "0",
    "sizes": "None",
    "options": "options",
}
_OPTIONS = "cd.CommunicationOptions(timeout_seconds=options.timeout_seconds, {})"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the contract: which argument shows it, and how that differs on one rank."""

    name: str
    argument: str
    odd: str


FIELDS = (
    Field("reduce op", "op", "'max'"),
    Field("dtype", "value", "np.ones((4, 8), np.float32)"),
    Field("shape", "value", "np.ones((4, 9))"),
    Field("structure", "value", "[np.ones((4, 8)), None]"),
    Field("root", "root", "1"),
    Field("axis", "axis", "1"),
    Field("sizes", "sizes", "[4, *[0] * (group.size - 1)]"),
    Field("bytes_per_pack", "options", _OPTIONS.format("bytes_per_pack=1 << 20")),
    Field("implementation", "options", _OPTIONS.format("implementation=cd.CommunicationImplementation.RING")),
)
OTHER_OPERATION = {"barrier": "all_reduce"}  # by default the other one is a barrier
SHORT = {("dtype", "all_reduce"), ("root", "broadcast"), ("operation", "reduce"), ("order", "all_gather")}


def usual(collective: str) -> str:
    return COLLECTIVES[collective].format(**USUAL)


def differences() -> Iterator[tuple[str, str, str]]:
    """(field, collective, the call of the rank that differs)"""
    for collective, call in COLLECTIVES.items():
        yield "operation", collective, usual(OTHER_OPERATION.get(collective, "barrier"))
        for field in FIELDS:
            if f"{{{field.argument}}}" in call:
                yield field.name, collective, call.format(**{**USUAL, field.argument: field.odd})
        yield "order", collective, "all_reduce('sum', np.ones(3), options)"


def differ(scene: Scene, odd_rank: int, collective: str, odd: str, swapped: bool) -> None:
    """Every rank hears who differs, and both descriptions with both source lines, at the latest at its next call."""
    others = [rank for rank in scene.everybody if rank != odd_rank]
    scene.strike()
    scene.ask(others, "call", call=usual(collective), timeout=scene.timeout, waits=False)
    scene.ask([odd_rank], "call", call=odd, site="odd.py", timeout=scene.timeout, waits=False)
    first = scene.outcomes(scene.everybody)
    returned = [rank for rank, outcome in first.items() if outcome.code is Code.OK]
    scene.ask(returned, "call", call="barrier(options)", timeout=scene.timeout)
    then = {**first, **scene.outcomes(returned)}
    heard = max(outcome.at for outcome in then.values()) - scene.struck_at
    for rank, outcome in then.items():
        fits = outcome.code is Code.INVALID_ARGUMENT and outcome.differing == (odd_rank,)
        fits = fits and outcome.text.startswith(f"rank {odd_rank} differs: ")
        fits = fits and all(site in outcome.text for site in ("odd.py:1", "usual.py:1"))
        assert fits, (
            f"rank {rank}: expected that {odd_rank} differs at odd.py:1, got {outcome.verdict} ({outcome.text})"
        )
    allowed = STALL_SECONDS + AT_ONCE_SECONDS + scene.late
    assert heard <= allowed, f"heard after {heard:.3f} s instead of within {allowed:.3f} s"
    scene.tell(heard, then[0])
    if swapped:  # the one that differed goes on with what the others have done already
        scene.ask(scene.everybody, "call", call=usual(collective), timeout=scene.timeout, waits=False)
        scene.succeed(scene.everybody)
    scene.agree()
    scene.submit(scene.everybody)
    scene.succeed(scene.everybody)


def told_at_leave(scene: Scene) -> None:
    """Ranks that had returned before anybody could know hear of it when they leave."""
    scene.strike()
    scene.ask(scene.others, "call", call=usual("broadcast"), timeout=scene.timeout, waits=False)
    odd = COLLECTIVES["broadcast"].format(**{**USUAL, "value": "np.ones((4, 9))"})
    scene.ask([VICTIM], "call", call=odd, site="odd.py", timeout=scene.timeout, waits=False)
    scene.hear(Code.INVALID_ARGUMENT, ranks=[VICTIM], words=("rank 2 differs: ", "odd.py:1", "usual.py:1"))
    tasks = range(scene.cell.workers)
    group_loops = scene.cluster.group_loops
    scene.limit.until(
        lambda: all(group_loop.generation != scene.generation for group_loop in group_loops(scene.group, list(tasks))),
        "the verdict on all workers",
    )
    for rank, outcome in scene.outcomes(scene.others).items():
        left = scene.ranks[rank].ask("leave").get(scene.limit)
        if outcome.code is Code.OK:
            told = left.get("code") == Code.INVALID_ARGUMENT and left["differing"] == [VICTIM]
            assert told, f"rank {rank} had returned, and heard {left} when it left"


def _cells() -> Iterator[Cell]:
    for workers in (1, 3):
        for field, collective, odd in differences():

            def drill(
                scene: Scene, collective: str = collective, odd: str = odd, swapped: bool = field == "order"
            ) -> None:
                for rank in (0, VICTIM):  # the root where there is one, and another
                    differ(scene, rank, collective, odd, swapped)

            short = workers == 3 and (field, collective) in SHORT
            yield Cell("mismatches", field, collective, drill, 8.0, workers, bystanders=workers == 1, short=short)
    yield Cell("mismatches", "told at leave", "broadcast", told_at_leave, 8.0, 3, bystanders=False)


ALL.extend(_cells())
