"""docs/reference/status.md is made of the protocol; docs/operate/status.md explains every kind of problem."""

from __future__ import annotations

import re

import pytest
from tests.docs.contents import ROOT
from tests.docs.status_fields import MESSAGES, PAGE, comments, fresh

from collectived_proto.report.findings import FindingKind


def test_the_fields_are_what_the_protocol_says() -> None:
    text = PAGE.read_text()
    assert text.count("<!-- made: fields -->") == 1
    assert fresh(text) == text, "run `make docs` and commit the result"


def test_a_changed_meaning_is_noticed() -> None:
    text = PAGE.read_text()
    assert fresh(text.replace("connected clients", "clients")) == text != text.replace("connected clients", "clients")


@pytest.mark.parametrize("name", MESSAGES)
def test_every_message_and_every_field_has_a_meaning(name: str) -> None:
    intro, meanings = comments()[name]
    assert intro and [field for field, said in meanings.items() if said] == [one.name for one in MESSAGES[name].fields]


def test_every_kind_of_trouble_is_explained_in_the_order_in_which_it_is_told() -> None:
    page = (ROOT / "docs/operate/status.md").read_text()
    assert re.findall(r"^\| `([A-Z]+)` \|", page, re.MULTILINE) == [kind.value.upper() for kind in FindingKind]
