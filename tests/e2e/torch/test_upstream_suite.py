"""PyTorch's own tests of torch.distributed, unmodified, pass over this backend.

A short tier runs wherever torch is installed; COLLECTIVED_TEST_UPSTREAM=1 (`make test-torch`) runs all.

Some two hundred of the 285 skip themselves: about 110 need CUDA, some 65 are bound to other backends' names, 16 want
eight ranks, ten are disabled upstream. So some 66 is all that a CPU backend by another name can pass.
"""

from __future__ import annotations

import os

import pytest
from tests.e2e.torch.upstream import run_suite
from tests.e2e.upstream_outcomes import failures, passes

pytest.importorskip("torch", reason="torch is not installed: make test-torch")
pytest.importorskip("expecttest", reason="PyTorch's own tests need expecttest: make test-torch")

SHORT = (
    "test_DistributedDataParallelCPU",
    "test_all_gather_coalesced_with_empty",
    "test_all_reduce_sum_async",
    "test_barrier",
    "test_broadcast",
    "test_destroy_group",
    "test_gather",
    "test_reduce_sum",
    "test_scatter",
    "test_send_recv_any_source",
)
_GROWS_ITS_MODEL_FOR_GLOO = 'the body asks `BACKEND == "gloo"` before it makes its model: UnboundLocalError'
_FOR_GLOO_ALONE = "torch.distributed.monitored_barrier refuses every backend that is not called gloo, up to torch 2.14"
CANNOT_PASS = {  # with the reason; of those that decorators give to Gloo alone
    "test_accumulate_gradients_no_sync": _GROWS_ITS_MODEL_FOR_GLOO,
    "test_accumulate_gradients_no_sync_allreduce_hook": _GROWS_ITS_MODEL_FOR_GLOO,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _GROWS_ITS_MODEL_FOR_GLOO,
    "test_accumulate_gradients_no_sync_grad_is_view": _GROWS_ITS_MODEL_FOR_GLOO,
    "test_monitored_barrier_gloo": _FOR_GLOO_ALONE,
    "test_monitored_barrier_gloo_rank_0_timeout": "wants the words `Rank 0 timed out in monitoredBarrier`",
    "test_monitored_barrier_gloo_subgroup": _FOR_GLOO_ALONE,
}

everything = pytest.mark.skipif(
    not os.environ.get("COLLECTIVED_TEST_UPSTREAM"), reason="takes minutes: COLLECTIVED_TEST_UPSTREAM=1"
)


@pytest.mark.timeout(300)
def test_a_few_of_each_kind_pass_with_two_ranks() -> None:
    outcomes = run_suite(2, SHORT)
    assert not failures(outcomes)
    assert passes(outcomes) == len(SHORT)


@everything
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_that_this_backend_can_run_pass(ranks: int) -> None:
    outcomes = run_suite(ranks)
    assert not failures(outcomes)
    assert passes(outcomes) >= 66


@everything
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("like", "least"), [("mpi", 9), ("gloo", 83)])
def test_those_of_other_backends_pass_but_for_a_known_few(like: str, least: int) -> None:
    names = ("*all_to_all*",) if like == "mpi" else ("*",)
    outcomes = run_suite(2, names, like)
    assert {name: why for name, why in failures(outcomes).items() if name not in CANNOT_PASS} == {}
    assert passes(outcomes) >= least
