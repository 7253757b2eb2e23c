"""Works are kept until somebody has waited for them, or has their future."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from collectived.integrations.c10d.lifetime import keep  # noqa: E402  # imports torch
from collectived.integrations.c10d.work import CompletedWork, FailedWork  # noqa: E402  # imports torch


def make_kept(work: Any) -> Any:
    keep(work)
    return weakref.ref(work)


def test_a_work_is_kept_until_it_is_waited_for() -> None:
    kept = make_kept(CompletedWork([]))
    gc.collect()
    kept().wait()
    assert kept() is None


def test_a_work_is_kept_until_its_future_is_asked_for() -> None:
    kept = make_kept(FailedWork(RuntimeError("it failed"), []))
    future = kept().get_future()
    assert kept() is None
    with pytest.raises(RuntimeError, match="it failed"):
        future.wait()


def test_of_works_that_nobody_waits_for_the_oldest_go() -> None:
    kept = [make_kept(CompletedWork([])) for _ in range(5000)]
    assert kept[0]() is None and kept[-1]() is not None
    for one in kept:
        if (work := one()) is not None:
            work.wait()
