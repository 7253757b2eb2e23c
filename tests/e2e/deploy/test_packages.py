"""The packages that others make of the sources ask for what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib

import yaml
from tests.e2e.deploy.commands import DEPLOY, ROOT

from collectived_proto.types import RELEASE

RECIPE = yaml.safe_load((DEPLOY / "conda/recipe.yaml").read_text())
LOCK = (DEPLOY / "docker/requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RENAMED = {"ml-dtypes": "ml_dtypes", "prometheus-client": "prometheus_client"}  # at conda-forge


def needed() -> dict[str, str]:
    """The packages that collectived needs, each with its versions."""
    found = [re.fullmatch(r"([\w-]+)(.*)", one) for one in PROJECT["dependencies"]]
    return {one[1]: one[2] for one in found if one}


def test_the_recipe_needs_the_same_packages_to_run() -> None:
    wanted = {f"{RENAMED.get(name, name)} {versions}" for name, versions in needed().items()}
    assert set(RECIPE["requirements"]["run"]) == {"python >=${{ python_min }}", *wanted}
    assert PROJECT["requires-python"] == f">={RECIPE['context']['python_min']}"


def test_the_recipe_is_of_this_release() -> None:
    assert RECIPE["context"]["version"] == RELEASE
    assert RECIPE["build"]["python"]["entry_points"] == [
        f"{name} = {target}" for name, target in PROJECT["scripts"].items()
    ]


def test_the_image_installs_every_package_by_hash_in_the_version_that_is_tested() -> None:
    locked = dict(re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE))
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements-dev.lock").read_text(), re.MULTILINE))
    tested = {name.lower().replace("_", "-"): version for name, version in tested.items()}
    assert set(needed()) <= set(locked)
    assert locked == {name: tested[name] for name in locked}
    for part in re.split(r"\n(?=[\w.-]+==)", LOCK)[1:]:
        assert "--hash=sha256:" in part, part


def test_the_command_and_its_man_pages_are_installed_by_the_wheel() -> None:
    shared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert shared["shared-data"] == {"launcher/man": "share/man/man1"}
