"""docs/operate/troubleshooting.md is run as it stands: its programs, and its commands in their order.

A command that ends with `&` is a job that goes on until its section is over; the next command comes when the job is in
the state that the section is about. Each line that is shown must come out, apart from numbers that differ from run to
run; `…` stands for any lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.docs.blocks import claimed, of_language
from tests.docs.stage import Stage, missing, reply, set_stage, until

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "troubleshooting.md"
BLOCKS = claimed(__file__)
_ELLIPSIS = "…"


def sections() -> dict[str, list[str]]:
    """The sessions of each section, by the title of the innermost heading."""
    found: dict[str, list[str]] = {}
    for block in BLOCKS:
        if block.language == "console":
            found.setdefault(block.section, []).append(block.text)
    return found


def programs() -> dict[str, str]:
    names = re.findall(r"^`(\w+\.py)`:\n\n```python", PAGE.read_text(), re.MULTILINE)
    return dict(zip(names, of_language(BLOCKS, "python"), strict=True))


def steps(sessions: list[str]) -> Iterator[tuple[str, list[str]]]:
    """(command, the lines that are shown below it), in order."""
    for session in sessions:
        for step in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
            command, *shown = step.splitlines()
            yield command, [line for line in shown if line != _ELLIPSIS]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with set_stage(tmp_path, programs(), monkeypatch) as made:
        yield made


def misses_rank_2() -> bool:
    seen = reply()
    flights = [flight for group in seen.groups for flight in group.in_flight] if seen else []
    return any(list(flight.missing) == [2] and flight.seconds > 1.2 for flight in flights)


def has_run_for_a_while() -> bool:
    seen = reply()
    return seen is not None and any(group.collectives_done >= 40 for group in seen.groups)


def forms_without_rank_2() -> bool:
    seen = reply()
    return seen is not None and any("2 of 3 ranks here" in group.waiting_for for group in seen.groups)


STATES = {"hangs.py": misses_rank_2, "slow.py": has_run_for_a_while, "joins.py": forms_without_rank_2}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("title", list(sections()))
def test_what_the_page_shows_comes_out(title: str, stage: Stage) -> None:
    for command, shown in steps(sections()[title]):
        if command.endswith("&"):
            stage.start(command.removesuffix("&"))
            (program,) = [name for name in STATES if name in command]
            until(STATES[program], f"{program} did not come to the state that this is about:\n{stage.said()}")
            until(partial(_all_said, shown, stage), f"{missing(shown, stage.said())} in:\n{stage.said()}")
        else:
            if "launch" in command:
                stage.end()
            said = stage.run(command)
            assert not missing(shown, said), f"$ {command}\n{said}"


def _all_said(shown: list[str], stage: Stage) -> bool:
    return not missing(shown, stage.said())


def test_every_command_of_ours_on_the_page_exists() -> None:
    from collectived_launcher.__main__ import collectived

    for sessions in sections().values():
        for command, _ in steps(sessions):
            for verb in re.findall(r"\bcollectived ([a-z]+)", command):
                assert verb in collectived.commands, command


def test_every_program_of_the_page_is_staged() -> None:
    assert set(programs()) == set(STATES)
