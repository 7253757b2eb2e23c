"""`collectived doctor --hosts` shows how many hosts it has asked, and how many pairs it has measured."""

from __future__ import annotations

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.docs.blocks import claimed
from tests.heard_stderr import BAR, heard_stderr

from collectived_launcher.doctor.hosts import examine_hosts

CARRIER = """#!/bin/sh
read _ < {gate}  # it waits for the test at each command
case "$2" in
*--serve*) exit 1 ;;
*) echo '{{"facts": {{"network": {{}}}}, "findings": []}}' ;;
esac
"""


@pytest.mark.parametrize(
    ("terminal", "asking", "measuring"),
    [
        (
            False,
            r"collectived doctor: asking hosts, 1 of 2 hosts done, \d+ s so far$",
            r"collectived doctor: measuring between hosts, 0 of 1 pairs done, \d+ s so far$",
        ),
        (True, rf"asking hosts {BAR} 1/2 0:\S+ localhost$", f"measuring between hosts {BAR} 0/1 0:"),
    ],
    ids=["pipe", "terminal"],
)
def test_who_waits_for_hosts_sees_how_far_it_is(
    terminal: bool, asking: str, measuring: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bar, line = (block.text.strip() for block in claimed(__file__))
    assert re.search(asking, re.sub("[━╺╸]+", BAR, bar) if terminal else line), (
        "docs/operate/watching.md shows the same"
    )
    gate, carrier = tmp_path / "gate", tmp_path / "carrier"
    os.mkfifo(gate)
    carrier.write_text(CARRIER.format(gate=gate))
    carrier.chmod(0o755)
    with (
        open(gate, "r+b", buffering=0) as opened,
        heard_stderr(monkeypatch, terminal=terminal) as heard,
        ThreadPoolExecutor(1) as pool,
    ):
        ending = pool.submit(examine_hosts, ["localhost", "b"], str(carrier), sys.executable)
        try:
            heard.hear(asking)
            opened.write(b"\n")
            heard.hear(measuring)
        finally:
            opened.write(b"\n\n")
        findings = ending.result()
    assert "asking b, for 60 s at most" in heard.text and "measuring localhost → b (1 of 1)" in heard.text
    (finding,) = findings
    assert finding.host == "localhost → b" and "the measurement did not come about" in finding.text
