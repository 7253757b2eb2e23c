"""docs/reference/configuration.md says what the declarations say."""

from __future__ import annotations

from tests.docs.configuration import PAGE, fresh


def test_the_tables_are_what_is_declared() -> None:
    text = PAGE.read_text()
    assert text.count("<!-- made:") == 3
    assert fresh(text) == text, "run `make docs` and commit the result"
