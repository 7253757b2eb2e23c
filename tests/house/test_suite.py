"""How the tests are run: what failed in company is asked once more alone, and nothing else is."""

from __future__ import annotations

from tests import suite


def test_nothing_is_asked_again_when_all_passed() -> None:
    assert suite.again(0, ["tests/a.py::test_b"]) == ()


def test_a_few_that_failed_are_asked_again() -> None:
    assert suite.again(suite.FAILED, ["tests/a.py::test_b"]) == ["tests/a.py::test_b"]


def test_many_failures_are_not_asked_again() -> None:
    assert suite.again(suite.FAILED, [f"tests/a.py::test_{n}" for n in range(suite.FEW + 1)]) == ()


def test_an_interrupted_run_or_one_that_could_not_collect_is_not_asked_again() -> None:
    for status in (2, 3, 4, 5):
        assert suite.again(status, ["tests/a.py::test_b"]) == ()


def test_the_last_word_names_the_tests_and_says_how_they_ended() -> None:
    assert suite.verdict(["tests/a.py::test_b"], 0).startswith("passed alone")
    assert "tests/a.py::test_b" in suite.verdict(["tests/a.py::test_b"], 1)
    assert suite.verdict(["tests/a.py::test_b"], 1).startswith("failed")


def test_more_than_two_that_had_to_be_asked_again_fail_the_run_though_they_pass_alone() -> None:
    names = [f"tests/a.py::test_{number}" for number in range(3)]
    assert suite.final_status(names[:2], 0) == 0 and suite.final_status(names, 0) == suite.FAILED
    assert suite.final_status(names[:1], 1) == 1
    assert "more than 2 fail the run" in suite.verdict(names, 0)


def test_python_keeps_what_it_has_compiled() -> None:
    kept = suite.surroundings({"PYTHONDONTWRITEBYTECODE": "1", "PATH": "/bin"})
    assert kept.items() >= {"PATH": "/bin"}.items() and "PYTHONDONTWRITEBYTECODE" not in kept


def test_matrices_have_one_thread_unless_the_shell_says_otherwise() -> None:
    assert suite.surroundings({})["OPENBLAS_NUM_THREADS"] == "1"
    assert suite.surroundings({"OPENBLAS_NUM_THREADS": "4"})["OPENBLAS_NUM_THREADS"] == "4"
