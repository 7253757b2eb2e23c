"""What a study says, and that it says what the plans say."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from collectived_proto.types import Peer
from collectived_runtime.coordinator.core.tuning import make_table
from collectived_runtime.plan.cost_model import LinkClass, Model, lower_bound
from collectived_runtime.plan.errors import ContributionError
from collectived_runtime.plan.hierarchical import Hosts
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.wide_moves import WideRound
from collectived_runtime.simulation.algorithms import TIMED_ALGORITHMS, make_plan, participants
from collectived_runtime.simulation.proof import Proof, RoundTooLarge, count_moves, prove, select_cases
from collectived_runtime.simulation.study import SimulationSpec, predict_cost, run_study

FREE = Model(LinkClass(0.0, 1e6), LinkClass(0.0, 1e12), overhead=0.0, fold=1e12, stream=1e12)


def test_a_ring_of_two_moves_the_vector_once_each_way() -> None:
    told = predict_cost(SimulationSpec((1, 1), (), (), FREE), "ring", 1_000_000, 1)
    assert told.rounds == 2
    assert told.seconds == pytest.approx(1.0)
    assert told.algorithm_bandwidth == told.bus_bandwidth == pytest.approx(1e6)


def test_a_connection_that_does_not_fill_the_link_is_what_a_round_waits_for() -> None:
    slow = Model(LinkClass(0.0, 1e6), overhead=0.0, fold=1e12, stream=0.25e6)
    seconds = [
        predict_cost(SimulationSpec((1, 1), (), (), slow), "ring", 1_000_000, shards).seconds for shards in (1, 2, 4, 8)
    ]
    assert seconds == pytest.approx([4.0, 2.0, 1.0, 1.0])


def test_shards_cost_their_messages() -> None:
    model = Model(LinkClass(0.0, 1e12), overhead=1e-3, fold=1e12, stream=1e12)
    one, four = (predict_cost(SimulationSpec((1, 1), (), (), model), "ring", 4096, shards).seconds for shards in (1, 4))
    assert four == pytest.approx(4 * one)


def test_one_participant_takes_no_time() -> None:
    told = run_study(SimulationSpec((1,), (4, 1 << 20), ("ring",)))
    for line in told.results:
        assert (line.lower_bound, line.auto.cost.seconds, line.auto.cost.bus_bandwidth) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("hosts", ((1,) * 8, (8,) * 4, (3, 1, 2)))
def test_auto_takes_what_the_coordinator_would(hosts: tuple[int, ...]) -> None:
    told = run_study(SimulationSpec(hosts, (4, 1 << 16, 1 << 24), ("ring",)))
    peers = [Peer(task, "", "", "", tuple(ranks)) for task, ranks in enumerate(participants(hosts))]
    expected = [(tier.limit, tier.algorithm, tier.shards) for tier in make_table(peers, Model())]
    assert [(row.limit, row.algorithm.removeprefix("leader/"), row.shards) for row in told.table] == expected
    for line in told.results:
        row = next(row for row in told.table if row.limit == -1 or line.nbytes <= row.limit)
        assert (line.auto.algorithm, line.auto.shards) == (row.algorithm, row.shards)
        assert line.auto.cost == predict_cost(told.spec, row.algorithm, line.nbytes, row.shards)
        assert line.lower_bound == lower_bound(hosts, line.nbytes, Model()) <= line.auto.cost.seconds


def test_4096_workers_of_eight_devices_are_studied() -> None:
    told = run_study(SimulationSpec((8,) * 4096, (1 << 16,), ("leader/halving_doubling", "leader/tree")))
    assert told.results[0].costs["leader/tree"].rounds == 2 * (3 + 12)


def test_a_proof_counts_what_the_busiest_sends() -> None:
    question = SimulationSpec((1,) * 4, (4096,), ("ring",))
    told = prove(question, "ring", 4096)
    assert told == Proof("ring", 4, 4096, 6, 6, 2 * 3 * 1024, told.seconds)
    assert count_moves(question, "ring", 4096) == 4 * (2 * 6 + 1)


def test_shards_are_proved_each() -> None:
    question = SimulationSpec((2, 1), (4096,), ("leader/ring",), shards=3)
    one, three = prove(SimulationSpec((2, 1), (4096,), ()), "leader/ring", 4096), prove(question, "leader/ring", 4096)
    assert (three.messages, three.sent) == (3 * one.messages, one.sent)


def test_the_smallest_and_the_largest_size_are_proved() -> None:
    question = SimulationSpec((1, 1), (4, 64, 1024), ("ring", "tree"))
    assert list(select_cases(question)) == [("ring", 4), ("ring", 1024), ("tree", 4), ("tree", 1024)]
    assert list(select_cases(SimulationSpec((1, 1), (4,), ("ring",)))) == [("ring", 4)]


@pytest.mark.parametrize("name", [name for name in TIMED_ALGORITHMS if name not in ("ring", "shuffle")])
def test_many_workers_are_proved(name: str) -> None:
    size = 512 if name == "one_shot" else 1024  # whose moves grow with the square
    told = prove(SimulationSpec((1,) * size, (), ()), name, 1 << 20)
    assert told.participants == size


def test_a_round_of_too_many_moves_is_refused_before_it_is_made() -> None:
    with pytest.raises(RoundTooLarge, match="a round of one_shot has 16,777,216 moves on 4,096 devices"):
        count_moves(SimulationSpec((1,) * 4096, (), ()), "one_shot", 4096)


def test_a_wrong_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_last(name: str, hosts: Hosts, me: int, span: Span) -> Iterable[WideRound]:
        return list(make_plan(name, hosts, me, span))[:-1]

    monkeypatch.setattr("collectived_runtime.simulation.proof.make_plan", forgets_the_last)
    with pytest.raises(ContributionError):
        prove(SimulationSpec((1, 1), (), ()), "ring", 4096)
