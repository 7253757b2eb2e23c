"""`collectived simulate` shows how many sizes it has predicted, and which plan it checks."""

from __future__ import annotations

import pytest
from tests.heard_stderr import BAR, heard_stderr

from collectived_runtime.simulation import cli

STUDY = ["--workers", "24", "--sizes", "1MiB,4MiB,16MiB", "--algorithms", "ring,tree", "--check", "--json"]  # 0.3 s


@pytest.mark.parametrize(
    ("terminal", "predicting", "checking"),
    [
        (
            False,
            r"collectived simulate: 2 algorithms on 24 devices, \d of 3 sizes done, \d+ s so far$",
            r"collectived simulate: checking [\d,]+ moves of ring at 16 MiB, \d of \d plans done, \d+ s so far$",
        ),
        (
            True,
            rf"2 algorithms on 24 devices {BAR} 3/3 0:\S+ 16 MiB$",
            rf"checking [\d,]+ moves of ring at 16 MiB {BAR} \d/\d 0:",
        ),
    ],
    ids=["pipe", "terminal"],
)
def test_who_waits_for_a_study_sees_how_far_it_is(
    terminal: bool, predicting: str, checking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with heard_stderr(monkeypatch, terminal=terminal) as heard:
        assert cli.main(STUDY) == 0
        heard.hear(predicting)
        heard.hear(checking)
