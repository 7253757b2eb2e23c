"""docs/guide/errors.md has the errors, and what to do next, as the coordinator's page has them."""

from __future__ import annotations

from tests.docs.errors_page import PAGE, fresh

from collectived import errors


def test_the_table_is_what_the_code_says() -> None:
    text = PAGE.read_text()
    assert text.count("<!-- made: errors -->") == 1
    assert fresh(text) == text, "run `make docs` and commit the result"


def test_every_error_has_its_row_and_its_links() -> None:
    table = PAGE.read_text().partition("<!-- made: errors -->")[2].partition("<!-- end -->")[0]
    kinds = set(errors.__all__) - {"Code", "CollectiveError"}
    assert not [kind for kind in kinds if f"| [`{kind}`](../reference/messages.md#{kind.lower()}) |" not in table]
    assert "[`rejoin`](recovery.md)" in table and "(a [rule](../operate/security.md#" in table


def test_a_changed_word_is_noticed() -> None:
    text = PAGE.read_text()
    assert (
        fresh(text.replace("correct the name", "guess a name"))
        == text
        != text.replace("correct the name", "guess a name")
    )
