"""Dockerfile and compose file: read by their parsers, of one mind with the daemons, and the commands in them run."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser
from tests.docs.blocks import claimed, taken_from
from tests.e2e.deploy.commands import COMPOSE, DEPLOY, ROOT, services

from collectived_proto.ipc import job_files

DOCKERFILE = DEPLOY / "docker/Dockerfile"
HEALTH = DEPLOY / "docker/health.py"
FOLDER = str(job_files.SYSTEM_FOLDER)
README = (ROOT / "README.md").read_text()
SECRET = "the-secret-of-these-tests"


def compose_command() -> list[str]:
    """`docker compose` or its predecessor; [] where neither is installed."""
    for words in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(words[0])
            and subprocess.run([*words, "version"], capture_output=True, check=False).returncode == 0
        ):
            return words
    return []


@pytest.fixture
def instructions(tmp_path: Path) -> list[dict[str, Any]]:
    parser = DockerfileParser(path=str(tmp_path), cache_content=True)
    parser.content = DOCKERFILE.read_text()
    return [entry for entry in parser.structure if entry["instruction"] != "COMMENT"]


def test_the_image_is_built_in_stages_from_slim_ones_of_docker_itself(instructions: list[dict[str, Any]]) -> None:
    images = [entry["value"].split()[0] for entry in instructions if entry["instruction"] == "FROM"]
    assert len(images) == 2 and len(set(images)) == 1
    # One release by its tag, the same by its digest, and no host name before it.
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+@sha256:[0-9a-f]{64}", images[0])


def test_it_runs_as_nobody_in_particular_and_tells_its_health(instructions: list[dict[str, Any]]) -> None:
    last = {entry["instruction"]: entry["value"] for entry in instructions}
    assert last["USER"] == "7450:7450" and last["ENTRYPOINT"] == '["collectived"]'
    assert '"/opt/collectived/health.py"' in last["HEALTHCHECK"]
    assert not {"ADD", "ARG", "MAINTAINER"} & last.keys()
    names = [entry["instruction"] for entry in instructions]
    assert names.index("USER") > max(at for at, name in enumerate(names) if name in ("RUN", "COPY"))


def test_what_it_copies_is_there_and_not_ignored(instructions: list[dict[str, Any]]) -> None:
    lines = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line[:1] == "!"]
    copied = [
        source
        for entry in instructions
        if entry["instruction"] == "COPY" and "--from" not in entry["value"]
        for source in entry["value"].split()[:-1]
    ]
    assert sorted(copied) == sorted(kept)
    assert all((ROOT / source).exists() for source in copied if source != "dist")  # which `make wheels` fills


def test_it_installs_the_wheel_and_all_else_by_hash(instructions: list[dict[str, Any]]) -> None:
    (build, *_) = [entry["value"] for entry in instructions if entry["instruction"] == "RUN"]
    steps = [step.strip() for step in build.split("&&")]
    (hashed,) = [step for step in steps if "--requirement requirements.lock" in step]
    (wheel,) = [step for step in steps if "dist/collectived-*" in step]
    assert "--require-hashes" in hashed and "--no-index --no-deps" in " ".join(wheel.split())
    assert sum("install" in step.split() for step in steps) == 2, "nothing comes in another way"


BUILDING = runpy.run_path(str(DEPLOY / "docker/build_image.py"), run_name="build_image")


def test_without_an_engine_the_same_steps_are_carried_out(instructions: list[dict[str, Any]]) -> None:
    recipe = BUILDING["read_recipe"](DOCKERFILE.read_text())
    done = [entry["value"] for entry in instructions if entry["instruction"] in ("RUN", "COPY")]
    assert [words for _, _, words in recipe.steps] == [words for words in done if "--from=build" not in words]
    assert (recipe.user, recipe.command) == ("7450:7450", "collectived")
    assert recipe.environment["PATH"] == "/opt/collectived/bin:$PATH"


def test_an_instruction_that_would_be_left_out_without_an_engine_is_named() -> None:
    with pytest.raises(SystemExit, match="Dockerfile has VOLUME"):
        BUILDING["read_recipe"]("FROM scratch\nVOLUME /var/lib/collectived\n")


def test_each_worker_has_a_folder_of_its_own_which_its_client_shares_read_only() -> None:
    folders = {}
    for name, service in services().items():
        (mounted,) = [volume for volume in service["volumes"] if FOLDER in volume] or [""]
        folders[name] = mounted
    assert folders == {
        "coordinator": "",
        "worker-0": f"sockets-0:{FOLDER}",
        "worker-1": f"sockets-1:{FOLDER}",
        "client-0": f"sockets-0:{FOLDER}:ro",
        "client-1": f"sockets-1:{FOLDER}:ro",
    }


def test_its_containers_are_closed_and_its_workers_have_a_limit() -> None:
    for name, service in services().items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"] and "privileged" not in service
        assert ("mem_limit" in service) == name.startswith("worker")


def test_the_demo_is_the_readmes() -> None:
    program = taken_from("README.md", "import collectived as cd")
    assert (DEPLOY / "compose/mean.py").read_text() == program


def test_the_commands_of_the_page_are_of_this_file_and_its_services() -> None:
    (export, compose), _ = (block.text.splitlines() for block in claimed(__file__))
    done = subprocess.run(
        ["bash", "-ec", f'{export}; echo "$COLLECTIVED_SECRET"'], text=True, capture_output=True, timeout=30, check=True
    )
    assert re.fullmatch(r"[0-9a-f]{64}\n", done.stdout)
    words = compose.split()
    assert words[:2] == ["docker", "compose"] and ROOT / words[words.index("--file") + 1] == COMPOSE
    if compose_command() == ["docker", "compose"]:
        asked = [*words[: words.index("up")], "up", "--help"]
        said = subprocess.run(asked, text=True, capture_output=True, timeout=30, check=True).stdout
        assert all(word in said for word in words[words.index("up") + 1 :])


@pytest.mark.skipif(not compose_command(), reason="neither docker compose nor docker-compose is installed")
def test_compose_itself_takes_the_file() -> None:
    command = [*compose_command(), "--file", str(COMPOSE), "config", "--quiet"]
    done = subprocess.run(
        command,
        env={**os.environ, "COLLECTIVED_SECRET": SECRET},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    without = {name: value for name, value in os.environ.items() if name != "COLLECTIVED_SECRET"}
    done = subprocess.run(command, env=without, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode != 0 and "make one" in done.stderr


class Services:
    """The compose file's services as processes of this machine: a folder for each volume, the loopback for names,
    and no container around them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.coordinator = ""
        self.started: list[subprocess.Popen[str]] = []

    def words(self, name: str) -> list[str]:
        """A service's command, as it is but for places."""
        sockets = self.folder / name.rpartition("-")[2]
        found = []
        for word in services()[name]["command"]:
            word = word.replace(FOLDER, str(sockets)).replace("/var/lib/collectived", str(self.folder))
            word = word.replace("coordinator:7450", self.coordinator)
            found.append(re.sub(r"(0\.0\.0\.0:7450|worker-\d:7452)$", "127.0.0.1:0", word))
        return found

    def start(self, *names: str) -> list[str]:
        """Starts daemons side by side; the first address of each, once all serve."""
        environment = {**os.environ, "COLLECTIVED_SECRET": SECRET}
        fresh = []
        for name in names:
            command = [sys.executable, "-m", "collectived_runtime", *self.words(name)]
            fresh.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            self.started.append(fresh[-1])
        lines = [process.stdout.readline() for process in fresh if process.stdout]
        return [address for line in lines for address in re.findall(r'^ready .*?"address": "(.*?)"', line)]

    def close(self) -> None:
        """Workers before the coordinator, to which they say goodbye."""
        for processes in (self.started[1:], self.started[:1]):
            for process in processes:
                process.terminate()
            for process in processes:
                with process:
                    pass


@pytest.fixture
def running() -> Iterator[Services]:
    with tempfile.TemporaryDirectory(prefix="cd-", dir="/tmp") as name:
        made = Services(Path(name))
        try:
            yield made
        finally:
            made.close()


def healthy(*address: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(HEALTH), *address], capture_output=True, text=True, timeout=30, check=False
    )
    return done.returncode, done.stderr


@pytest.mark.timeout(120)
def test_the_commands_of_the_compose_file_run_and_its_clients_print_what_the_readme_says(running: Services) -> None:
    (running.coordinator,) = running.start("coordinator")
    for folder in ("0", "1"):
        (running.folder / folder).mkdir(mode=0o750)
    workers = running.start("worker-0", "worker-1")
    assert [healthy(address) for address in (running.coordinator, workers[0])] == [(0, "")] * 2
    ranks = []
    for name in ("client-0", "client-1"):
        service = services()[name]
        assert service["entrypoint"] == ["python", "/program/mean.py"]
        worker = workers[int(name[-1])]
        environment = {
            **os.environ,
            **service["environment"],
            "COLLECTIVED_WORKER": worker,
            "COLLECTIVED_TIMEOUT": "30",
        }
        command = [sys.executable, str(DEPLOY / "compose/mean.py")]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [rank.communicate(timeout=50)[0] for rank in ranks]
    _, printed = claimed(__file__)
    assert "".join(said) == printed.text


def test_health_names_whom_it_asked_where_nobody_answers(tmp_path: Path) -> None:
    status, said = healthy(f"unix:{tmp_path}/none.sock")
    assert status == 1 and said.startswith(f"unix:{tmp_path}/none.sock: UNAVAILABLE: ")
