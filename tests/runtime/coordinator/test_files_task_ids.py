"""Numbers of workers that bring none."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectived_runtime.coordinator.files import TaskIdFile, choose_task_id


def test_hosts_get_the_smallest_numbers_that_nobody_has_or_had() -> None:
    assert choose_task_id("a", {}, {}) == 0
    assert choose_task_id("b", {"a": 0, "gone": 1}, {0: "a", 2: "told its own"}) == 3


def test_a_host_keeps_its_number_whether_its_worker_is_there_or_not() -> None:
    known = {"a": 0, "b": 1}
    assert choose_task_id("b", known, {0: "a"}) == choose_task_id("b", known, {0: "a", 1: "b"}) == 1


def test_a_host_whose_number_another_worker_was_told_to_have_gets_a_new_one() -> None:
    assert choose_task_id("a", {"a": 0}, {0: "b"}) == 1


def test_numbers_are_kept_over_restarts_of_the_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "epoch.workers"
    first = TaskIdFile(path)
    assert [first.assign_task_id(host, {}) for host in ("a", "b", "a")] == [0, 1, 0]
    assert [TaskIdFile(path).assign_task_id(host, {}) for host in ("b", "c")] == [1, 2]
    assert sorted(tmp_path.iterdir()) == [path]


def test_without_a_file_they_are_kept_for_as_long_as_it_lives() -> None:
    roll = TaskIdFile()
    assert [roll.assign_task_id(host, {5: "x"}) for host in ("b", "a", "b")] == [0, 1, 0]


@pytest.mark.parametrize("text", ["", "[]", '{"a": "first"}'])
def test_a_file_that_is_no_roll_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "roll").write_text(text)
    with pytest.raises(ValueError, match="roll does not hold the numbers of workers.* remove it"):
        TaskIdFile(tmp_path / "roll")
