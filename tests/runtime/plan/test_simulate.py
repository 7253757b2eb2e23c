"""What the simulator predicts, and what AUTO makes of the model."""

from __future__ import annotations

import tracemalloc

import pytest

from collectived_proto.all_reduce_spec import ALGORITHMS
from collectived_runtime.plan import hierarchical, ring
from collectived_runtime.plan.auto import ANY_SIZE, HostLayout, Row, choose, digest, select_row
from collectived_runtime.plan.catalog import FLAT_ALGORITHMS, all_reduce
from collectived_runtime.plan.closed_form import TIMES
from collectived_runtime.plan.cost_model import LinkClass, Model, lower_bound
from collectived_runtime.plan.moves import Span
from collectived_runtime.plan.simulate import Prediction, sample_hosts, simulate

SIZES = (1 << 10, 1 << 16, 1 << 22)


def flat(name: str, size: int, nbytes: int, model: Model | None = None, sample: int = 64) -> Prediction:
    members, count = range(size), nbytes // 4
    hosts = [(member,) for member in members]
    return simulate(lambda me: FLAT_ALGORITHMS[name](members, me, Span(0, count)), hosts, count, 4, model, sample)


def test_a_ring_of_two_is_two_messages_of_half_the_span() -> None:
    model = Model(LinkClass(1e-3, 1e6), overhead=0.0, fold=1e12)
    predicted = flat("ring", 2, 2_000_000, model)
    assert predicted.seconds == pytest.approx(2 * (1e-3 + 1.0))
    assert predicted.rounds == 2
    assert predicted.algorithm_bandwidth == pytest.approx(2e6 / predicted.seconds)
    assert predicted.bus_bandwidth == predicted.algorithm_bandwidth


def test_a_slow_fold_is_what_a_round_waits_for() -> None:
    model = Model(LinkClass(0.0, 1e9), overhead=0.0, fold=1e6)
    assert flat("ring", 2, 2_000_000, model).seconds == pytest.approx(1.0 + 1e-3)


def test_participants_of_a_host_share_its_link() -> None:
    model = Model(LinkClass(0.0, 1e6), LinkClass(0.0, 1e12), overhead=0.0, fold=1e12)
    hosts = ((0, 1, 2, 3), (4, 5, 6, 7))
    span = Span(0, 1_000_000)

    def seconds(inside: hierarchical.InnerStage) -> float:
        plan = lambda me: hierarchical.all_reduce(hosts, me, span, ring.all_reduce, inside)  # noqa: E731
        return simulate(plan, hosts, len(span), 4, model).seconds

    group_loops, leader = seconds(hierarchical.InnerStage.LANES), seconds(hierarchical.InnerStage.LEADER)
    assert group_loops == pytest.approx(leader, rel=1e-3) and group_loops == pytest.approx(4.0, rel=1e-3)


@pytest.mark.parametrize(
    "hosts", (((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 1, 2, 3),), ((0,), (1,), (2,), (3,), (4,)))
)
@pytest.mark.parametrize("name", sorted({*ALGORITHMS, *FLAT_ALGORITHMS}))
def test_nothing_is_faster_than_the_lower_bound(name: str, hosts: tuple[tuple[int, ...], ...]) -> None:
    for nbytes in SIZES:
        count = nbytes // 4
        plan = lambda me, count=count: all_reduce(name, hosts, me, Span(0, count))  # noqa: E731
        if name.startswith("nccl"):
            continue
        assert simulate(plan, hosts, count).seconds >= lower_bound([len(host) for host in hosts], nbytes, Model())


def test_one_participant_takes_no_time() -> None:
    assert flat("ring", 1, 1 << 20).seconds == 0.0
    assert lower_bound([1], 1 << 20, Model()) == 0.0


@pytest.mark.parametrize("size", (2, 3, 4, 5, 8, 17, 64))
@pytest.mark.parametrize("name", TIMES)
def test_the_closed_forms_agree_with_the_simulator(name: str, size: int) -> None:
    model = Model(crowd=size / 1000)
    for nbytes in SIZES:
        predicted, simulated = TIMES[name](size, nbytes, model), flat(name, size, nbytes, model).seconds
        if name == "double_tree":
            assert 0.9 <= predicted / simulated <= (2.7 if size == 2 else 1.5)
        else:
            assert predicted == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("size", (2, 3, 4, 5, 8, 17, 64))
@pytest.mark.parametrize("name", TIMES)
def test_the_closed_forms_are_estimates_where_processors_are_shared(name: str, size: int) -> None:
    model = Model(crowd=size / 2)
    for nbytes in SIZES if size < 64 else SIZES[:1]:
        ratio = TIMES[name](size, nbytes, model) / flat(name, size, nbytes, model).seconds
        assert 0.55 <= ratio <= (6.5 if name == "double_tree" else 1.3)


@pytest.mark.parametrize("name", ("ring", "tree", "halving_doubling", "shuffle"))
def test_a_sample_of_the_hosts_predicts_what_all_of_them_do(name: str) -> None:
    for size in (33, 64, 100):
        assert flat(name, size, 1 << 20, sample=8).seconds == pytest.approx(
            flat(name, size, 1 << 20, sample=size).seconds
        )


def test_a_sample_holds_the_first_and_the_last_host() -> None:
    assert sample_hosts(3, 8) == [0, 1, 2]
    assert sample_hosts(100, 4) == [0, 33, 66, 99]


def test_4096_hosts_of_8_are_simulated_in_little_memory() -> None:
    def simulated(count: int) -> Prediction:
        hosts = [tuple(range(8 * number, 8 * number + 8)) for number in range(count)]

        def plan(me: int) -> object:
            return hierarchical.all_reduce_rounds(
                hosts, me, span, ring.all_reduce_rounds, hierarchical.InnerStage.LANES
            )

        return simulate(plan, hosts, len(span), sample=2)  # type: ignore[arg-type]

    span = Span(0, 1 << 24)
    predicted = simulated(4096)
    assert predicted.rounds == 7 + 2 * 4095 + 7
    assert predicted.seconds >= lower_bound([8] * 4096, 4 << 24, Model())
    tracemalloc.start()  # which takes five times as long
    simulated(1024)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20  # bytes


def test_the_table_ends_with_the_rest_and_its_limits_increase() -> None:
    for hosts in (1, 2, 3, 4, 8, 64, 4096):
        table = choose(HostLayout((8,) * hosts))
        assert table[-1].limit == ANY_SIZE
        limits = [row.limit for row in table[:-1]]
        assert limits == sorted(set(limits))


def test_the_table_is_the_same_value_wherever_it_is_made() -> None:
    topology = HostLayout((2, 2, 1))
    assert hash(choose(topology)) == hash(choose(HostLayout((2, 2, 1))))
    assert choose(topology) == choose(HostLayout((2, 2, 1)))
    assert digest(choose(topology)) == digest(choose(HostLayout((2, 2, 1))))
    assert digest(choose(topology)) != digest(choose(topology, ("ring",)))


@pytest.mark.parametrize("hosts", (2, 3, 4, 8, 17, 64))
def test_auto_chooses_what_the_simulator_finds_fastest(hosts: int) -> None:
    table = choose(HostLayout((1,) * hosts))
    for nbytes in (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 24):
        times = {name: flat(name, hosts, nbytes).seconds for name in TIMES}
        assert times[select_row(table, nbytes).algorithm] <= 1.05 * min(times.values())


def test_only_what_is_offered_is_chosen() -> None:
    assert {row.algorithm for row in choose(HostLayout((1,) * 8), ("ring", "tree"))} == {"ring", "tree"}


def test_a_slow_connection_asks_for_shards_of_large_vectors_only() -> None:
    table = choose(HostLayout((1, 1), Model(stream=0.5e9)))
    assert (select_row(table, 1 << 10).shards, select_row(table, 1 << 24).shards) == (1, 3)


def test_a_row_can_be_read() -> None:
    assert str(Row(1024, "tree", 1, 1 << 20)) == "up to 1024 bytes: tree, 1 shards, packs of 1048576 bytes"
    assert str(Row(ANY_SIZE, "ring", 2, 0)) == "more: ring, 2 shards, packs of 0 bytes"
