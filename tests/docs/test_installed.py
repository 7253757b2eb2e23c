"""The line of README.md that installs the package does so, in a new virtual environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.blocks import claimed
from tests.docs.installed import Installation

from collectived_proto.types import RELEASE


@pytest.mark.timeout(150)
def test_the_package_is_installed_with_its_command_and_its_core(tmp_path: Path) -> None:
    (block,) = claimed(__file__)
    installation = Installation(tmp_path)
    installation.run(block.text)
    assert RELEASE in installation.run("collectived --version")
    where = "import collectived, collectived_native; print(collectived.__file__); print(collectived_native.__file__)"
    found = installation.run(f"env -u COLLECTIVED_NATIVE python -c '{where}'").splitlines()
    assert all(Path(path).is_relative_to(installation.packages) for path in found), found
