"""The tables of docs/operate/metrics.md: `python -m tests.docs.configuration` (`make docs`) writes them."""

from __future__ import annotations

import re

from tests.docs.contents import ROOT

from collectived_runtime.metrics.catalogue import (
    COMMON_METRICS,
    COORDINATOR_METRICS,
    PROCESS_METRICS,
    WORKER_METRICS,
    Metric,
)

PAGE = ROOT / "docs" / "operate" / "metrics.md"
_PART = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES = {
    "both": [*COMMON_METRICS, *PROCESS_METRICS.values()],
    "worker": [metric for metric in WORKER_METRICS.values() if metric not in COMMON_METRICS],
    "coordinator": [metric for metric in COORDINATOR_METRICS.values() if metric not in COMMON_METRICS],
}


def fresh(text: str) -> str:
    """The page with its tables as the catalogue is now."""
    return _PART.sub(lambda found: f"{found[1]}{_table(TABLES[found[2]])}{found[3]}", text)


def _table(metrics: list[Metric]) -> str:
    lines = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|", *map(_row, metrics)]
    return "".join(f"{line}\n" for line in lines)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {_unit(metric)} | {labels or '-'} | {metric.help} |"


def _unit(metric: Metric) -> str:
    name = metric.name.removesuffix("_total")
    return next((unit for unit in ("seconds", "bytes") if name.endswith(f"_{unit}")), "number")
