"""What the benchmark of joining makes of its figures."""

from __future__ import annotations

import pytest
from benchmarks.elastic import STEPS, Steps, elapsed, lines, main, share_out


def test_a_step_lasts_from_the_last_call_to_the_last_return() -> None:
    assert elapsed([(1.0, 9.5), (8.0, 9.0), (2.0, 8.5)]) == 1.5


def test_the_first_sum_has_no_goal_and_links_are_bounded() -> None:
    alone = Steps({step: [0.3, 0.6, 0.4] for step in STEPS}, {step: [0.7, 0.6, 0.9] for step in STEPS}, 12)
    many = Steps({step: [3.0] for step in STEPS}, {step: [1.0] for step in STEPS}, 40)
    found = lines(64, 1024, alone, many)
    assert [line.measured for line in found] == [0.4] * 4 + [40]
    assert [line.met for line in found] == [True] * 4 + [False]
    assert {line.note for line in found[:-1]} == {"0.70 s of processor time"}
    assert found[-1].note == "they joined in 3.00 s"
    assert not any("first sum" in line.what for line in found)


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 64])
def test_every_process_has_ranks_and_every_rank_a_process(size: int) -> None:
    shares = share_out(size)
    assert all(shares) and len(shares) <= 8
    assert sorted(rank for share in shares for rank in share) == list(range(size))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--workers", "1"], "--workers 1: 2 or more are needed"),
        (["--workers", "4", "--ranks", "0"], "--ranks 0: expected a multiple of the 4 workers"),
        (["--workers", "4", "--ranks", "6"], "--ranks 6: expected a multiple of the 4 workers"),
    ],
)
def test_a_number_that_cannot_be_measured_is_refused_by_name(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["elastic", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err
