"""A study and its proofs as one JSON object; docs/guide/simulate.md explains the keys to readers of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from collectived_runtime.simulation.proof import Proof
from collectived_runtime.simulation.study import ITEMSIZE, SizeResult, Study


def study_to_dict(study: Study, proofs: Sequence[Proof] | None = None) -> dict[str, Any]:
    """Seconds, bytes, and bytes per second throughout; `check` is there where a check was asked for."""
    question = study.spec
    told: dict[str, Any] = {
        "hosts": list(question.hosts),
        "itemsize": ITEMSIZE,
        "shards": question.shards,
        "model": asdict(question.model),
        "sizes": [_result_to_dict(line) for line in study.results],
        "auto": [asdict(row) for row in study.table],
    }
    if proofs is not None:
        told["check"] = [asdict(proof) for proof in proofs]
    return told


def _result_to_dict(line: SizeResult) -> dict[str, Any]:
    return {
        "bytes": line.nbytes,
        "lower_bound_seconds": line.lower_bound,
        "algorithms": {name: asdict(figure) for name, figure in line.costs.items()},
        "auto": {"algorithm": line.auto.algorithm, "shards": line.auto.shards, **asdict(line.auto.cost)},
    }
