"""Dashboard and alerts: they ask for nothing that there is not, and every alert says where to read on.

What Prometheus itself thinks of them is asked of its `promtool`, where that is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docs.blocks import claimed

from collectived_proto.config.daemons import CoordinatorSettings, WorkerSettings
from collectived_proto.config.settings import list_settings
from collectived_runtime.metrics.catalogue import COORDINATOR_METRICS, PROCESS_METRICS, WORKER_METRICS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/dashboards"
DASHBOARD = json.loads((FOLDER / "collectived.json").read_text())
ALERTS = (FOLDER / "alerts.yaml").read_text()
PAGE = (ROOT / "docs/operate/metrics.md").read_text()
METRICS = {**WORKER_METRICS, **COORDINATOR_METRICS, **PROCESS_METRICS}
SCRAPER = {"instance", "job"}  # labels that Prometheus adds
_NAME = re.compile(r"\b(?:collectived|process)_[a-z_]+\b")
_NAMED = re.compile(r"\b((?:collectived|process)_[a-z_]+)(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def panels() -> list[tuple[str, str]]:
    """Title and expression."""
    return [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel["targets"]]


def rules() -> dict[str, dict[str, str]]:
    """Of each alert, its expression, summary and runbook; read as far as these files are written."""
    found = {}
    for block in ALERTS.split("- alert: ")[1:]:
        name, *lines = block.splitlines()
        text = "\n".join(lines)
        expression = re.search(r"expr: (?:>-\n)?(.*?)\n +for:|expr: (?:>-\n)?(.*?)\n +labels:", text, re.DOTALL)
        runbook = re.search(r"runbook: (\S+)", text)
        assert expression and runbook, name
        found[name] = {"expr": " ".join((expression[1] or expression[2]).split()), "runbook": runbook[1]}
    return found


EXPRESSIONS = [*panels(), *((name, rule["expr"]) for name, rule in rules().items())]


def base(name: str) -> str:
    """The metric to which a series belongs."""
    return name if name in METRICS else re.sub(r"_(bucket|sum|count)$", "", name)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_expressions_ask_for_metrics_and_labels_that_there_are(title: str, expression: str) -> None:
    labels = set(SCRAPER)
    for name, selector in _NAMED.findall(expression):
        assert base(name) in METRICS, f"there is no {name}"
        metric = METRICS[base(name)]
        assert (base(name) != name) == (metric.kind == "histogram")
        own = {*metric.labels, *(["le"] if metric.kind == "histogram" else [])}
        labels |= own
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= own | SCRAPER, f"labels of {name}"
    for listed in _GROUPED.findall(expression):
        assert {label.strip() for label in listed.split(",")} <= labels


def test_legends_and_variables_name_labels_that_there_are() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            shown = {label for name in _NAME.findall(target["expr"]) for label in METRICS[base(name)].labels}
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= shown | SCRAPER, panel["title"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
            assert label in METRICS[name].labels


def test_every_alert_has_a_section_that_says_what_to_do() -> None:
    assert len(rules()) == ALERTS.count("alert:") >= 6
    for name, rule in rules().items():
        path, _, anchor = rule["runbook"].partition("#")
        assert (ROOT / path).exists() and anchor == name.lower()
        assert f"\n#### {name}\n" in PAGE
    assert re.findall(r"\n#### (\w+)\n", PAGE) == list(rules())


def test_panels_do_not_lie_over_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at: dict[str, Any] = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def promtool(*arguments: str, text: str = "") -> str:
    """What it says, where it is content."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([tool, *arguments], cwd=FOLDER, input=text, text=True, capture_output=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_takes_the_alerts_and_they_fire_when_they_should() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("test", "rules", "alerts.test.yaml")


def test_every_alert_is_tested() -> None:
    tested = set(re.findall(r"alertname: (\w+)", (FOLDER / "alerts.test.yaml").read_text()))
    assert tested == set(rules())


def test_promtool_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rule_file = tmp_path / "dashboard.yaml"
    listed = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, (_, expression) in enumerate(panels())
    ]
    rule_file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": listed}]}))  # JSON is YAML
    assert "SUCCESS" in promtool("check", "rules", str(rule_file))


def test_promtool_takes_the_example_of_a_configuration_beside_its_token(tmp_path: Path) -> None:
    for name in ("prometheus.yaml", "alerts.yaml"):
        shutil.copy(FOLDER / name, tmp_path)
    (token,) = re.findall(r"credentials_file: (\S+)", (tmp_path / "prometheus.yaml").read_text())
    (tmp_path / token).write_text("0123456789abcdef0123456789abcdef\n")
    assert "SUCCESS" in promtool("check", "config", str(tmp_path / "prometheus.yaml"))
    assert f"credentials_file: {token}" in PAGE, "docs/operate/metrics.md shows the same"


def test_the_page_has_the_job_of_the_example_and_the_ports_of_the_daemons() -> None:
    (block,) = claimed(__file__)
    (shown,), (whole,) = (
        yaml.safe_load(text)["scrape_configs"] for text in (block.text, (FOLDER / "prometheus.yaml").read_text())
    )
    assert set(shown) <= set(whole)
    assert {**shown, "static_configs": ""} == {**{key: whole[key] for key in shown}, "static_configs": ""}
    ports = {target.partition(":")[2] for one in shown["static_configs"] for target in one["targets"]}
    assert ports == {
        key.const
        for settings in (CoordinatorSettings, WorkerSettings)
        for key in list_settings(settings)
        if key.name == "metrics"
    }
