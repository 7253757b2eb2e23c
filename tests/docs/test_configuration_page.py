"""docs/reference/configuration.md says what the declarations say, and its commands print what it shows."""

from __future__ import annotations

from pathlib import Path

from tests.docs.blocks import claimed
from tests.docs.configuration import PAGE, fresh
from tests.docs.own_root import run_as_root
from tests.docs.sessions import differs, steps

SESSION, REFUSALS = (block.text for block in claimed(__file__))
FILE = "/etc/collectived/collectived.toml"
_MADE = f"""
mkdir -p /etc/collectived
(umask 077; openssl rand -hex 32 > /etc/collectived/secret)
cat > {FILE} <<'END'
{{content}}
END
"""


def test_the_tables_are_what_is_declared() -> None:
    text = PAGE.read_text()
    assert text.count("<!-- made:") == 3
    assert fresh(text) == text, "run `make docs` and commit the result"


def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    (shows, content), (asks, table) = steps(SESSION)
    assert shows == f"cat {FILE}"
    said = run_as_root(_MADE.format(content="\n".join(content)) + f"COLUMNS=120 {asks}", tmp_path).splitlines()
    assert not differs(columns(table), columns(said))


def columns(lines: list[str]) -> list[str]:
    """However wide they are: the page leaves out the longest rows."""
    return [" ".join(line.split()) for line in lines]


def test_the_refusals_are_the_words_of_a_daemon(tmp_path: Path) -> None:
    (_, content), _ = steps(SESSION)
    wrong = [line.replace("memory_limit", "memory_limt") for line in content]
    assert wrong != content
    script = _MADE.format(content="\n".join(wrong)) + "collectived worker 2>&1 && exit 1; "
    script += f"{_MADE.format(content=chr(10).join(content))}"
    script += "COLLECTIVED_WORKER_MEMORY_LIMIT=64MB collectived worker --folder /f 2>&1 && exit 1; true"
    assert run_as_root(script, tmp_path) == REFUSALS
