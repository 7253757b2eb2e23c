"""Every block of README.md and docs/ is run or checked by a test that its fence names (`tests/docs/blocks.py`)."""

from __future__ import annotations

from collections import Counter

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
# Pages with blocks that are checked and not run: how many, and why. The numbers may only become smaller.
CHECKED = {
    "docs/guide/algorithms.md": (1, "a schedule as a drawing: its arrows are compared with those of the plan"),
    "docs/guide/gpus.md": (1, "a wheel for GPUs and daemons on GPUs, which a test cannot have"),
    "docs/internals/performance.md": (1, "measurements of up to an hour, on a machine that does nothing else"),
    "docs/internals/reliability.md": (1, "all drills; their short form is part of the tests"),
    "docs/operate/bench.md": (1, "a measurement of sizes up to 64 MiB: its title, columns and last lines are compared"),
    "docs/operate/containers.md": (2, "the image is built by `make image`; compose needs a container engine"),
    "docs/operate/doctor.md": (1, "findings of one machine: the names of the checks are compared"),
    "docs/operate/kubernetes.md": (1, "kubectl needs a cluster: the files and objects that it names are compared"),
    "docs/operate/metrics.md": (2, "Prometheus and grpcurl: ports, paths and methods are compared with the code"),
    "docs/operate/security.md": (4, "files of daemons for other hosts and users: the daemons' own parser reads them"),
}


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


def test_few_blocks_are_only_checked_and_each_has_a_reason() -> None:
    counts = Counter(block.page for block in BLOCKS if block.how == "checked")
    assert counts == {page: count for page, (count, _) in CHECKED.items()}, "let a test run the new one"
    assert all(reason for _, reason in CHECKED.values())


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
