"""Every block of README.md and docs/ is run or checked by a test that its fence names (`tests/docs/blocks.py`)."""

from __future__ import annotations

import pytest
from tests.docs.blocks import GENERATED, ROOT, SNIPPETS, Block, all_blocks, claimed

BLOCKS = all_blocks()
# Nothing here can be run or checked: (page, first line) -> why. The list may only become shorter.
DRAWING = "a drawing of processes and what passes between them: it has no command, no name of the code and no figure"
EXCEPTIONS = {
    ("README.md", " your process                worker daemon (one per host)              other workers"): DRAWING,
    ("docs/operate/ssh.md", " here                              on each host"): DRAWING,
}
MOST_EXCEPTIONS = 2


def key(block: Block) -> tuple[str, str]:
    return block.page, block.first_line


def test_every_block_has_an_owner() -> None:
    without = [
        f"{block.place}: {block.first_line}" for block in BLOCKS if not block.owner and key(block) not in EXCEPTIONS
    ]
    assert not without, "say behind the language of the fence which test runs it: see tests/docs/blocks.py"


def test_exceptions_are_few_have_a_reason_and_are_needed() -> None:
    assert len(EXCEPTIONS) <= MOST_EXCEPTIONS and all(EXCEPTIONS.values())
    assert set(EXCEPTIONS) == {key(block) for block in BLOCKS if not block.owner}


@pytest.mark.parametrize(
    "owner", sorted({block.owner for block in BLOCKS if block.owner} | {*GENERATED.values()} - {""})
)
def test_an_owner_is_a_test_that_takes_its_blocks(owner: str) -> None:
    assert (ROOT / owner).is_file(), f"there is no {owner}"
    if any(block.owner == owner and block.how != "generated" for block in BLOCKS):
        assert "claimed(__file__" in (ROOT / owner).read_text(), f"{owner} does not ask for its blocks"


def test_a_block_is_handed_to_the_test_that_it_names() -> None:
    mine = claimed(str(ROOT / SNIPPETS))
    assert mine == [block for block in BLOCKS if (block.how, block.owner) == ("run", SNIPPETS)]
    with pytest.raises(
        AssertionError, match="no block of the pages says that it belongs to tests/house/test_blocks.py"
    ):
        claimed(__file__)
