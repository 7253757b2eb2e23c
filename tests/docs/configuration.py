"""docs/reference/configuration.md: `python -m tests.docs.configuration` (`make docs`) writes its tables.

It writes those of docs/guide/errors.md, docs/operate/limits.md, docs/operate/metrics.md, docs/reference/environment.md
and docs/reference/status.md too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tests.docs import environment_page, errors_page, limits_page, metrics_page, status_fields

from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.settings import REQUIRED, Setting, list_settings

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "configuration.md"
_PART = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def fresh(text: str) -> str:
    """The page with its tables as the keys are now."""
    return _PART.sub(lambda found: f"{found[1]}{_table(found[2])}{found[3]}", text)


def _table(part: str) -> str:
    shared = [key for key in list_settings(next(iter(DAEMONS.values()))) if not key.table]
    keys = shared if part == "both" else [key for key in list_settings(DAEMONS[part]) if key.table]
    lines = ["| key | what it says | kind | default | flag | variable |", "|---|---|---|---|---|---|", *_rows(keys)]
    return "".join(f"{line}\n" for line in lines)


def _rows(keys: Iterable[Setting]) -> Iterable[str]:
    for key in keys:
        name = f"`{key.name}`" if key.allowed_in_file else "(not in the file)"
        flags = ", ".join(f"`{flag}`" for flag in key.flags) or "none"
        yield f"| {name} | {key.description} | {key.value_type.name} | {_default(key)} | {flags} | `{key.variable}` |"


def _default(key: Setting) -> str:
    if key.default is REQUIRED:
        return "needed"
    return "" if key.default in (None, "") else f"`{key.value_type.to_toml(key.default)}`"


if __name__ == "__main__":
    PAGE.write_text(fresh(PAGE.read_text()))
    for other in (environment_page, errors_page, limits_page, metrics_page, status_fields):
        other.PAGE.write_text(other.fresh(other.PAGE.read_text()))
