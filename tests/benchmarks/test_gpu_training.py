"""What the benchmark of training on a GPU makes of its figures, and all of it on the CPU where PyTorch is installed."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks import gpu_training
from benchmarks.gpu_training import GROUP, HOOK, NAMES, PEER, Training, compare, difference, parse, report
from benchmarks.page import between

from collectived.gpu import driver
from collectived.gpu.driver import CudaError

GOOD = Training([2.0, 1.0, 0.5], 0.002, "ab")


def test_what_a_rank_says_at_its_end_is_found_among_warnings() -> None:
    assert parse(f"warning: something\nfound {json.dumps(asdict(GOOD))}\n") == GOOD


def test_equal_curves_and_weights_are_no_fault() -> None:
    assert compare({name: [GOOD, GOOD] for name in NAMES}) == []
    assert difference([GOOD], [GOOD]) == 0


def test_ranks_with_other_weights_curves_that_differ_and_a_loss_that_stays_are_faults() -> None:
    other = Training([2.0, 1.1, 0.5], 1, "cd")
    stays = Training([2.0, 2.0, 2.0], 1, "ab")
    assert compare({PEER: [GOOD, Training(GOOD.losses, 1, "cd")]}) == [
        f"{PEER}: the weights are not the same bits on all ranks"
    ]
    assert compare({PEER: [GOOD, GOOD], HOOK: [other, other]}) == [
        f"{HOOK}: a loss differs from that of {PEER} by 1.0e-01, more than 1e-05"
    ]
    assert compare({GROUP: [stays]}) == [f"{GROUP}: nothing was learned, the loss of rank 0 went from 2.0000 to 2.0000"]
    nan = Training([2.0, float("nan"), 0.5], 1, "ab")
    assert len(compare({PEER: [GOOD], HOOK: [nan]})) == 1


def test_the_report_has_a_row_for_each_and_says_what_failed() -> None:
    text = report({PEER: [GOOD, GOOD], GROUP: [GOOD, GOOD]}, "where", ["hook: it did not end"])
    assert text.startswith("where\n\n**Failed**: hook: it did not end.")
    assert f"| {GROUP} | 2.00 ms | 2.0000 to 0.5000 | none | the same bits |" in text
    assert f"| {GROUP} | 2.00 ms | 2.0000 to 0.5000 |  |  |" in report({GROUP: [GOOD]}, "", [])


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> None:
        raise CudaError("cuInit", 100, "CUDA_ERROR_NO_DEVICE")

    monkeypatch.setattr(driver, "get_cuda", none)
    monkeypatch.setattr("sys.argv", ["gpu_training"])
    assert gpu_training.main() == 1
    assert "no GPU can be trained on: cuInit failed: CUDA_ERROR_NO_DEVICE" in capsys.readouterr().err


def test_a_rank_that_fails_is_named_with_its_last_words() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-torch")
    with pytest.raises(RuntimeError, match=r"rank 0 ended with status 1: .*no median"):
        gpu_training.run(PEER, "cpu", 0)


@pytest.mark.timeout(200)
def test_all_train_alike_on_the_cpu() -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-torch")
    found = {name: gpu_training.run(name, "cpu", 5) for name in NAMES}
    assert {len(one.losses) for ranks in found.values() for one in ranks} == {5}
    assert all(difference(ranks, found[PEER]) <= gpu_training.TOLERANCE for ranks in found.values())
    assert all(ranks[0].weights == ranks[1].weights for ranks in found.values())


def test_the_page_has_a_place_for_it() -> None:
    page = Path(__file__).parents[2] / "docs" / "internals" / "performance.md"
    assert "figures" in between(page.read_text(), "gpu training", "figures")
