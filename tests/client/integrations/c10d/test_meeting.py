"""Ranks of a process group come by one name through c10d's store."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

from collectived.integrations.c10d.meeting import agree_on_name  # noqa: E402  # imports torch


def test_all_ranks_with_a_store_get_one_name_again_and_again() -> None:
    store = torch.distributed.HashStore()
    assert len({agree_on_name(store, "0") for _ in range(5)}) == 1


def test_other_stores_give_other_names() -> None:
    names = {agree_on_name(torch.distributed.HashStore(), "0") for _ in range(5)}
    assert len(names) == 5 and all(name.startswith("torch/world/") for name in names)


def test_a_process_group_of_some_ranks_has_its_number() -> None:
    assert agree_on_name(torch.distributed.HashStore(), "1").startswith("torch/1/")


def test_the_id_of_a_group_is_shown_without_what_would_steer_a_terminal() -> None:
    name = agree_on_name(torch.distributed.HashStore(), "mesh\x1b[31m default/" + "x" * 99)
    assert name.startswith("torch/mesh-") and "\x1b" not in name and len(name) < 64
