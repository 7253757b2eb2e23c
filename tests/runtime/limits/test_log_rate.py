"""Lines of a log: so many of one kind a second, and how many more there were."""

from __future__ import annotations

import logging

from collectived_runtime.limits.log_rate import MAX_LINES_PER_SECOND, LogRateFilter


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._sparing = LogRateFilter()

    def say(self, at: float, text: str = "refused %d", number: int = 0, line: int = 1, facts: bool = False) -> None:
        record = logging.LogRecord("collectived", logging.WARNING, "a.py", line, text, (number,), None)
        record.created = at
        if facts:
            record.facts = {}
        if self._sparing.filter(record):
            self.lines.append(record.getMessage())


def test_a_flood_of_one_kind_is_few_lines_and_the_next_says_how_many_were_left_out() -> None:
    log = Log()
    for number in range(10_000):
        log.say(100.5, number=number)
    assert log.lines == [f"refused {number}" for number in range(MAX_LINES_PER_SECOND)]
    log.say(102.0, number=7)
    assert log.lines[-1] == f"refused 7 ({10_000 - MAX_LINES_PER_SECOND} more like this were left out before)"
    log.say(102.1, number=8)
    assert log.lines[-1] == "refused 8"


def test_other_kinds_are_told_meanwhile() -> None:
    log = Log()
    for number in range(100):
        log.say(100.5, number=number)
    log.say(100.6, "another %d", 3, line=2)
    assert log.lines[-1] == "another 3"


def test_failures_of_groups_are_always_told() -> None:
    log = Log()
    for number in range(100):
        log.say(100.5, number=number, facts=True)
    assert len(log.lines) == 100


def test_a_clock_that_goes_back_silences_nobody() -> None:
    log = Log()
    for _ in range(100):
        log.say(500.0)
    log.say(400.0, number=9)
    assert log.lines[-1].startswith("refused 9")
