"""Logs of daemons: one line per event, as text or JSON, and failures with the identifiers that everything else uses.

A record may carry *facts* (`extra=facts(…)`): what it is about, by name. JSON lines have them as fields; texts say them
in words.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from collectived_proto.errors import Code
from collectived_proto.report.phrases import sanitize_text
from collectived_proto.types import Verdict, unscoped_name
from collectived_runtime.limits.log_rate import LogRateFilter

_LINE_BREAK = re.compile(r"\s*\n\s*")
_CONTROL_CHARACTERS = re.compile(
    "[\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)  # a terminal


def configure(level: str, form: str) -> None:
    """Logs of this process go to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    handler.addFilter(is_worth_logging)
    handler.addFilter(LogRateFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def is_worth_logging(record: logging.LogRecord) -> bool:
    """Whether a record is worth a line: not that a caller had gone before its answer came.

    gRPC's server logs that with a traceback, like a defect (`grpc._cython.cygrpc.ExecuteBatchError`).
    """
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name.startswith("grpc") and type(error).__name__ == "ExecuteBatchError")


def log_fields(**named: Any) -> dict[str, Any]:
    """Return the extra of a logging call."""
    return {"facts": named}


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """For the extra of a logging call: what a failure is, in the words of status and trace."""
    return log_fields(
        event="failure",
        group=unscoped_name(verdict.group),
        key=verdict.key,
        generation=verdict.generation,
        instance=verdict.instance,
        op=verdict.op,
        code=_code_name(verdict),
        missing=[member.rank for member in verdict.missing],
        decided_by=verdict.decided_by,
    )


def _code_name(verdict: Verdict) -> str:
    try:
        return Code(verdict.code).name
    except ValueError:
        return str(verdict.code)


def _escape(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"


class TextLines(logging.Formatter):
    """`2026-11-22 13:09:17,332 WARNING collectived.group_loop: …`; a line break in a message is written as `; `."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _LINE_BREAK.sub("; ", sanitize_text(super().formatMessage(record)))

    def format(self, record: logging.LogRecord) -> str:
        return sanitize_text(super().format(record))  # a traceback too, whose lines stay


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the facts, and a traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{whole}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told = getattr(record, "facts", None)
        if isinstance(told, Mapping):
            line |= told
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _CONTROL_CHARACTERS.sub(_escape, json.dumps(line, default=str, ensure_ascii=False))
