"""docs/operate/limits.md has the limits and rates of the code."""

from __future__ import annotations

import pytest
from tests.docs.limits_page import PAGE, fresh, limits

from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.settings import list_settings
from collectived_runtime.limits import closing, descriptors, log_rate, login_throttle, rate_limit

TEXT = PAGE.read_text()
WORDS = " ".join(TEXT.split())
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def test_the_tables_are_what_the_code_has() -> None:
    assert TEXT.count("<!-- made:") == 2
    assert fresh(TEXT) == TEXT, "run `make docs` and commit the result"


def test_a_changed_number_is_noticed() -> None:
    assert TEXT.count("| 1,024 | `worker.max_sessions` |") == 1
    assert fresh(TEXT.replace("| 1,024 | `worker.max_sessions` |", "| 1,025 | `worker.max_sessions` |")) == TEXT


def test_every_key_of_a_limit_has_a_row() -> None:
    keys = {key.path for kind in DAEMONS.values() for key in list_settings(kind) if key.name.startswith("max_")}
    assert {f"`{path}`" for path in keys} <= {row.key for row in limits()}


@pytest.mark.parametrize(
    "sentence",
    [
        f"at most {rate_limit.MAX_DELAY_SECONDS:g} s",
        f"A log has at most {log_rate.MAX_LINES_PER_SECOND} lines a second",
        f"up to {descriptors.TARGET_DESCRIPTORS:,}",
        f"at most {descriptors.RESERVED_DESCRIPTORS}, is reserved",
        f"Behind {NUMBERS[closing._MOST_HELD_UP]} blocked threads at most {closing.MOST_WAITING} connections wait",
        f"At most {login_throttle.MAX_ADDRESSES:,} addresses are remembered",
    ],
)
def test_the_numbers_of_the_text_are_those_of_the_code(sentence: str) -> None:
    assert sentence in WORDS
