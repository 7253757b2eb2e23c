"""Lines of a program that run again, and results that are written over inputs: the same values as the first time."""

from __future__ import annotations

import _thread
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

import collectived as cd

FRAMES = 3  # of ours in a call that its line has made before: the collective's own, its operation's, and one more
LARGE = 1_200_000  # elements: more than one tick of a segment


@pytest.fixture(params=["one_worker", "two_workers"])
def cluster(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def test_values_of_foreign_byte_order_are_reduced_by_value_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = np.arange(4, dtype=">f4")
        return [group.all_reduce("sum", value).tolist() for _ in range(3)]

    assert cluster.run(2, body) == [[[0.0, 2.0, 4.0, 6.0]] * 3] * 2


def test_a_gather_along_another_axis_is_the_same_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = np.array([[1, 2], [3, 4]]) + 10 * group.rank
        return [group.all_gather(value, axis=1).tolist() for _ in range(3)]

    assert cluster.run(2, body) == [[[[1, 2, 11, 12], [3, 4, 13, 14]]] * 3] * 2


def test_arrays_that_are_not_contiguous_are_the_same_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = np.arange(6.0).reshape(2, 3).T
        return [group.all_reduce("sum", value).tolist() for _ in range(3)]

    assert cluster.run(2, body) == [[[[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]] * 3] * 2


CALLS: dict[str, Callable[[cd.Group, Any, Any], Any]] = {
    "all_reduce": lambda group, value, out: group.all_reduce("sum", value, out=out),
    "mean": lambda group, value, out: group.all_reduce("mean", value, out=out),
    "reduce": lambda group, value, out: group.reduce("sum", value, root=1, out=out),
    "broadcast": lambda group, value, out: group.broadcast(value, root=1, out=out),
    "all_gather": lambda group, value, out: group.all_gather(value, out=out),
    "scatter": lambda group, value, out: group.scatter(value, out=out),
    "reduce_scatter": lambda group, value, out: group.reduce_scatter("sum", value, out=out),
    "all_to_all": lambda group, value, out: group.all_to_all(value, out=out),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_list_of_arrays_is_the_same_each_time(cluster: Any, name: str) -> None:
    """With new results, with others, and in place; its arrays change, and for some calls their lengths do."""

    def body(group: cd.Group) -> list[str]:
        call, wrong = CALLS[name], []
        for step in range(9):
            counts = [4, 6, 2] if step != 5 else [8, 2, 4]
            kinds = (np.float32, np.int64, np.float16)
            value = [
                np.full(n, 10 * step + group.rank + at, kind)
                for at, (n, kind) in enumerate(zip(counts, kinds, strict=True))
            ]
            one_by_one = [call(group, array, None) for array in value]
            if step % 3 == 0 or one_by_one[0] is None:
                found = call(group, value, None)
            elif step % 3 == 1:
                out = [np.zeros_like(array) for array in one_by_one]
                found = call(group, value, out)
                wrong += ["out"] * (found is not out)
            else:
                fits = all(
                    array.shape == one.shape and array.dtype == one.dtype
                    for array, one in zip(value, one_by_one, strict=True)
                )
                found = call(group, value, value if fits else None)
            found = [None] * 3 if found is None else found
            for one, other in zip(found, one_by_one, strict=True):
                same = one is other is None or (one.dtype == other.dtype and one.tolist() == other.tolist())
                wrong += [f"{step}: {one}, not {other}"] * (not same)
        return wrong

    assert cluster.run(2, body) == [[], []]


@pytest.mark.parametrize("count", [1, 6000])
@pytest.mark.parametrize("name", ["all_gather", "gather"])
def test_a_list_of_which_another_rank_s_lengths_change_is_joined_in_order(cluster: Any, name: str, count: int) -> None:
    """Rank 0 gives the same each time: its call is begun again as it was, and is told that the other's is not."""

    def body(group: cd.Group) -> list[Any]:
        found = []
        for step in range(6):
            rows = 2 + (step % 2 if group.rank else 0)
            value = [np.full((rows, count), 10 * step + group.rank + at) for at in range(2)]
            joined = group.all_gather(value) if name == "all_gather" else group.gather(value)
            found.append(None if joined is None else [one[:, 0].tolist() for one in joined])
        return found

    wanted = [[[10 * step + at] * 2 + [10 * step + 1 + at] * (2 + step % 2) for at in range(2)] for step in range(6)]
    assert cluster.run(2, body) == [wanted, wanted if name == "all_gather" else [None] * 6]


def _shrink(value: list[Any], out: list[Any]) -> None:
    value.pop()
    out.clear()


def test_arrays_of_many_axes_and_lists_that_change_meanwhile_do_no_harm(cluster: Any) -> None:
    def body(group: cd.Group) -> list[Any]:
        found: list[Any] = []
        for _ in range(3):
            found.append([one.sum() for one in group.all_reduce("sum", [np.ones((1,) * 17), np.ones(2)])])
        for step in range(3):
            value, out = [np.ones(2), np.ones(3)], [np.zeros(2), np.zeros(3)]
            if group.rank == step % 2:
                time.sleep(0.15)
            else:
                threading.Timer(0.05, _shrink, (value, out)).start()
            group.all_reduce("sum", value, out=out if step else None)
            found.append(len(value))
        return found

    first, second = cluster.run(2, body)
    assert first == [[2.0, 4.0]] * 3 + [2, 1, 2] and second == [[2.0, 4.0]] * 3 + [1, 2, 1]


def test_a_rank_that_waits_long_in_a_call_of_a_list_gets_its_results(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        found = []
        for step in range(4):
            if group.rank == step % 2:
                time.sleep(0.1)  # beyond what the core waits by itself
            value, out = [np.full(3, step + group.rank), np.ones(2)], [np.zeros(3, int), np.zeros(2)]
            group.all_reduce("sum", value, out=out)
            found.append([one.tolist() for one in out])
        return found

    wanted = [[[2 * step + 1] * 3, [2.0] * 2] for step in range(4)]
    assert cluster.run(2, body) == [wanted] * 2


@pytest.mark.parametrize("count", [4, LARGE])
def test_results_may_change_places_with_inputs(cluster: Any, count: int) -> None:
    def body(group: cd.Group) -> Any:
        one, two = np.full(count, 1.0), np.full(count, 5.0)
        group.all_reduce("sum", [one, two], out=[two, one])
        return bool((two == 2.0).all() and (one == 10.0).all())

    assert cluster.run(2, body) == [True] * 2


@pytest.mark.parametrize("count", [2, LARGE])
def test_an_uneven_all_to_all_may_be_written_over_its_value(cluster: Any, count: int) -> None:
    sizes = [[1, 2, 3], [3, 1, 2], [2, 3, 1]]  # rows of the senders; columns add up to the same

    def body(group: cd.Group) -> Any:
        mine = [rows * count for rows in sizes[group.rank]]
        value = np.concatenate([np.full(rows, 10 * group.rank + to) for to, rows in enumerate(mine)])
        wanted = np.concatenate(
            [np.full(sizes[sender][group.rank] * count, 10 * sender + group.rank) for sender in range(3)]
        )
        found = []
        for _ in range(2):
            buffer = value.copy()
            group.all_to_all(buffer, sizes=mine, out=buffer)
            found.append(bool(np.array_equal(buffer, wanted)))
        return found

    assert cluster.run(3, body) == [[True, True]] * 3


def test_a_broadcast_of_thousands_of_arrays_reaches_those_that_have_a_template(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = {f"layer{number}.weight": np.full(1 + number % 7, float(group.rank)) for number in range(3000)}
        return all((array == 0.0).all() for array in group.broadcast(value).values())

    assert cluster.run(2, body) == [True] * 2


def test_a_scatter_and_an_open_broadcast_of_thousands_of_arrays_arrive(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        value = {f"layer{number}.weight": np.arange(2.0 + number % 7) for number in range(3000)}
        pieces = group.scatter(value if group.rank == 0 else None)
        taken = group.broadcast(value if group.rank == 0 else None)
        return len(pieces), len(taken), taken["layer5.weight"].tolist() == list(range(7))

    assert cluster.run(2, body) == [(3000, 3000, True)] * 2


def test_a_rank_that_takes_what_comes_gets_another_value_each_time(cluster: Any) -> None:
    values: list[Any] = [
        *(np.full(6, float(number)) for number in range(3)),  # alike
        *(np.arange(2 * number, dtype=np.int32) for number in (1, 2, 3)),  # of other lengths
        *({"a": np.ones(2), "b": None}, np.arange(4.0).reshape(4, 1), LARGE * [1.0], np.arange(LARGE)),
    ]

    def body(group: cd.Group) -> Any:
        found = []
        for value in (*values, *values):
            if isinstance(value, np.ndarray):
                found.append(group.scatter(value if group.rank == 0 else None))
            found.append(group.broadcast(value if group.rank == 0 else None))
        return found

    values[-2] = np.array(values[-2])
    first, second = cluster.run(2, body)
    wanted_first, wanted_second = [], []
    for value in (*values, *values):
        if isinstance(value, np.ndarray):
            half = len(value) // 2
            wanted_first.append(value[:half])
            wanted_second.append(value[half:])
        wanted_first.append(value)
        wanted_second.append(value)
    for found, wanted in ((first, wanted_first), (second, wanted_second)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            if isinstance(other, dict):
                assert list(one) == list(other) and np.array_equal(one["a"], other["a"]) and one["b"] is None
            else:
                assert one.dtype == other.dtype and one.shape == other.shape and np.array_equal(one, other)


def test_out_takes_what_comes_from_the_same_line_each_time_if_it_fits(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        is_root, found = group.rank == 0, []
        for number in range(6):
            out: Any = np.zeros(2)
            if number == 4:
                out = np.zeros((2, 2))[:, 0]  # not contiguous
            if number == 5 and not is_root:
                out.flags.writeable = False
            value = np.arange(4.0) + number if is_root else None
            try:
                result = group.scatter(value, out=out)
                assert result is out
                found.append(out.tolist())
            except ValueError as error:
                found.append(str(error))
                group.scatter(value)  # which the root waits for
        return found

    first, second = cluster.run(2, body)
    assert first == [[number, number + 1.0] for number in range(6)]
    assert second[:5] == [[number + 2.0, number + 3.0] for number in range(5)]
    assert "read-only" in second[5]


def test_where_no_result_comes_out_is_left_alone_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        out = np.zeros(2)
        found = [group.gather(np.ones(1) + group.rank, out=out) is out for _ in range(3)]
        assert [group.barrier() for _ in range(3)] == [None] * 3
        return found, out.tolist()

    assert cluster.run(2, body) == [([True] * 3, [1.0, 2.0]), ([False] * 3, [0.0, 0.0])]


def test_a_result_that_lies_across_its_input_is_right_each_time(cluster: Any) -> None:
    def body(group: cd.Group) -> Any:
        base, found = np.empty(6), []
        for shift in (2, 0, 2, 1, 0):
            value, out = base[:4], base[shift : shift + 4]
            value[:] = np.arange(4.0)
            found.append(group.all_reduce("sum", value, out=out).tolist())
        return found

    assert cluster.run(2, body) == [[[0.0, 2.0, 4.0, 6.0]] * 5] * 2


def test_a_repeated_call_enters_few_functions(one_worker: Any) -> None:
    """What they take is most of what a small collective takes."""

    def body(group: cd.Group) -> Any:
        value, out = np.ones(2, np.float32), np.zeros(2, np.float32)
        both, rank = np.zeros(4, np.float32), group.rank
        entered: list[CodeType] = []

        def note(frame: FrameType, event: str, argument: object) -> None:
            if event == "call":
                entered.append(frame.f_code)

        def count(call: Callable[[], object]) -> int:
            """The least of some, for one that has to wait for long goes another way."""
            frames = []
            for _ in range(8):
                sys.setprofile(note)
                try:
                    call()
                finally:
                    sys.setprofile(None)
                frames.append(len(entered) - 1)  # without the lambda
                entered.clear()
            return min(frames)

        return {
            "all_reduce": count(lambda: group.all_reduce("sum", value, out=out)),
            "mean": count(lambda: group.all_reduce(cd.ReduceOp.MEAN, value)),
            "reduce": count(lambda: group.reduce("sum", value, 1)),
            "broadcast": count(lambda: group.broadcast(value, root=1)),
            "what comes": count(lambda: group.broadcast(None if rank else value)),
            "all_gather": count(lambda: group.all_gather(value, out=both)),
            "gather": count(lambda: group.gather(value)),
            "scatter": count(lambda: group.scatter(None if rank else both)),
            "reduce_scatter": count(lambda: group.reduce_scatter("sum", both)),
            "all_to_all": count(lambda: group.all_to_all(both)),
            "barrier": count(lambda: group.barrier()),
            "message": count(lambda: group.recv(0) if rank else group.send(value, 1)),
        }

    most = {"mean": FRAMES + 1}  # an enumeration is looked up by a function of Python
    for found in one_worker.run(2, body):
        assert {name: frames for name, frames in found.items() if frames > most.get(name, FRAMES)} == {}


def test_a_thread_that_does_nothing_but_collectives_gets_its_results(one_worker: Any) -> None:
    def body(group: cd.Group) -> Any:
        found = []
        for turn in range(3):
            out = np.zeros(2)
            thread = threading.Thread(
                target=group.all_reduce, args=("sum", np.full(2, turn + 1.0)), kwargs={"out": out}
            )
            thread.start()
            thread.join()
            found.append(out.tolist())
        for turn in range(3):
            out = np.zeros(2)
            _thread.start_new_thread(
                group.all_reduce, ("sum", np.full(2, turn + 1.0)), {"out": out}
            )  # no frame calls it
            while not out.all():
                time.sleep(0.001)
            found.append(out.tolist())
        return found

    assert one_worker.run(2, body) == [[[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]] * 2] * 2


def test_values_of_more_axes_than_are_remembered_come_each_time(cluster: Any) -> None:
    shapes = [(1,) * axes for axes in (15, 16, 17, 32)]

    def body(group: cd.Group) -> Any:
        found = []
        for _ in range(3):
            for shape in shapes:
                spread = group.broadcast(np.ones(shape) if group.rank == 0 else None)
                if group.rank == 0:
                    group.send(np.ones(shape), 1)
                found.append((spread if group.rank == 0 else group.recv(0)).shape == spread.shape == shape)
        return all(found)

    assert cluster.run(2, body) == [True] * 2


@pytest.mark.parametrize("transport", ["", "grpc"], ids=["shared memory", "gRPC"])
def test_a_list_of_many_more_than_may_be_in_flight_waits_for_room_and_calls_back(
    cluster: Any, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transport:
        monkeypatch.setenv("COLLECTIVED_TRANSPORT", transport)
    counts = [LARGE if number % 32 == 9 else 100 for number in range(160)]

    def body(group: cd.Group) -> Any:
        called: list[float] = []
        all_called = threading.Event()

        def callback(work: cd.Work[Any]) -> None:
            called.append(float(work.result()[-1]))
            if len(called) == len(counts):
                all_called.set()

        values = [np.full(count, number, np.float32) for number, count in enumerate(counts)]
        works = [group.all_reduce("mean", value, async_op=True) for value in values]
        for work in works:
            work.add_done_callback(callback)
        assert all_called.wait(20)
        group.barrier()
        return sorted(called)

    assert cluster.run(2, body) == [[float(number) for number in range(160)]] * 2
