"""What daemons log: one line per event, and each failure once with its identifiers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable

import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # which its stubs leave out

from collectived_proto.errors import Code
from collectived_proto.types import Member, Verdict
from collectived_runtime.logs import (
    JsonLines,
    TextLines,
    is_worth_logging,
    log_fields,
    verdict_fields,
)

VERDICT = Verdict(
    "job/train",
    7,
    100,
    Code.DEADLINE_EXCEEDED,
    "rank 1 was missing",
    5,
    instance=5,
    op="all_reduce(sum)",
    missing=(Member(1, "", 0, "", 0),),
)
FACTS = {
    "event": "failure",
    "group": "train",
    "key": 7,
    "generation": 100,
    "instance": 5,
    "op": "all_reduce(sum)",
    "code": "DEADLINE_EXCEEDED",
    "missing": [1],
    "decided_by": "coordinator",
}


@pytest.fixture
def record() -> Callable[..., logging.LogRecord]:
    def make(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
        logger = logging.getLogger("collectived.test")
        return logger.makeRecord(logger.name, logging.WARNING, __file__, 1, message, arguments, None, extra=extra)

    return make


def test_a_failure_has_the_identifiers_of_status_and_trace() -> None:
    assert verdict_fields(VERDICT)["facts"] == FACTS


def test_json_is_one_object_a_line(record: Callable[..., logging.LogRecord]) -> None:
    line = JsonLines().format(record("group %s:\n%s", "train", "gone", **verdict_fields(VERDICT)))
    assert "\n" not in line
    told = json.loads(line)
    assert {key: told[key] for key in FACTS} == FACTS
    assert (told["level"], told["logger"], told["message"]) == ("warning", "collectived.test", "group train:\ngone")
    assert told["time"].endswith("Z") and len(told["time"]) == len("2026-11-22T13:09:17.332Z")


def test_a_traceback_is_part_of_the_object(record: Callable[..., logging.LogRecord]) -> None:
    one = record("a defect")
    try:
        raise ValueError("no")
    except ValueError:
        one.exc_info = sys.exc_info()
    assert "ValueError: no" in json.loads(JsonLines().format(one))["traceback"]


@pytest.mark.parametrize(("error", "told"), [(cygrpc.ExecuteBatchError, False), (ValueError, True)])
def test_a_caller_that_went_before_its_answer_came_is_no_news(error: type[Exception], told: bool) -> None:
    logger = logging.getLogger("grpc._cython.cygrpc")
    try:
        raise error("Failed grpc_call_start_batch")
    except error:
        raised = sys.exc_info()
    assert is_worth_logging(logger.makeRecord(logger.name, logging.ERROR, __file__, 1, "raised", (), raised)) is told
    assert is_worth_logging(logger.makeRecord(logger.name, logging.ERROR, __file__, 1, "something else", (), None))


def test_text_is_one_line(record: Callable[..., logging.LogRecord]) -> None:
    line = TextLines().format(record("two\nlines", **log_fields(event="x")))
    assert line.endswith(" WARNING collectived.test: two; lines")


def test_names_do_not_steer_the_terminal_that_shows_a_log(record: Callable[..., logging.LogRecord]) -> None:
    one = record("label %s joined", "\x1b[2J\x9b31m\u202ex")
    try:
        raise ValueError("\x1b]0;title\x07")
    except ValueError:
        one.exc_info = sys.exc_info()
    text, line = TextLines().format(one), JsonLines().format(one)
    assert not set("\x1b\x07\x9b\u202e") & set(text + line)
    assert "\ufffd[2J\ufffd31m\ufffdx" in text and "\nValueError" in text
    assert json.loads(line)["message"] == one.getMessage()
