"""docs/operate/security.md and SECURITY.md: settings and commands on them are understood, and statements are true."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.docs.blocks import ROOT, claimed, of_language
from tests.docs.own_root import run_as_root

from collectived_launcher.cluster.file import COORDINATOR_PORT
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.resolve import resolve_settings
from collectived_proto.config.settings import list_settings
from collectived_proto.config.sources import load_config_file
from collectived_proto.ipc.messages import TOKEN_BYTES
from collectived_runtime.auth.credentials import AccessLevel, read_client_tokens, read_viewing_token
from collectived_runtime.grpc_server.authentication import check_exposed
from collectived_runtime.metrics import catalogue
from collectived_runtime.transport.connections import HANDSHAKE_SECONDS
from collectived_runtime.worker.sessions import SESSION_ID_BYTES

PAGE = (ROOT / "docs/operate/security.md").read_text()
MODEL = (ROOT / "SECURITY.md").read_text()
SETTINGS = of_language(claimed(__file__), "toml")
FOLDER = "/etc/collectived"
AS_ROOT = ("groupadd", "useradd", "usermod", "install", "chgrp", "ss")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page, with the files that its commands make there; those that need root are left out."""
    there = tmp_path_factory.mktemp("etc")
    for block in of_language(claimed(__file__), "sh"):
        lines = [line for line in block.splitlines() if not line.startswith(AS_ROOT)]
        subprocess.run(
            ["sh", "-e"], input="\n".join(lines).replace(FOLDER, str(there)), text=True, check=True, timeout=30
        )
    return there


def written(text: str, folder: Path) -> Path:
    path = folder / "collectived.toml"
    path.write_text(text.replace(FOLDER, str(folder)))
    return path


def test_root_makes_users_folders_secrets_and_tokens_by_the_commands_of_the_page(tmp_path: Path) -> None:
    made = "/run/collectived /etc/collectived/secret /etc/collectived/client-tokens /etc/collectived/viewing-token"
    listens = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(flush=True); sys.stdin.read()"
    script = f"""
        useradd alice; groupadd monitoring; mkdir /etc/collectived
        coproc python -c "{listens}"; read -u "${{COPROC[0]}}"  # something that `ss` can show
        {"".join(of_language(claimed(__file__), "sh"))}
        stat --format='%n %a %U:%G' {made}
        id --groups --name alice
    """
    *listeners, run, secret, clients, viewing, alice = run_as_root(script, tmp_path).splitlines()
    assert listeners and all("LISTEN" in line for line in listeners)
    assert run == "/run/collectived 750 collectived:collectived"
    assert secret == "/etc/collectived/secret 600 root:root"
    assert clients == "/etc/collectived/client-tokens 600 root:root"
    assert viewing == "/etc/collectived/viewing-token 640 root:monitoring"
    assert alice.split() == ["alice", "collectived"]


@pytest.mark.parametrize("text", SETTINGS)
def test_every_file_of_settings_has_keys_that_there_are_with_values_that_they_can_have(text: str, folder: Path) -> None:
    file = load_config_file(written(text, folder))
    for settings in DAEMONS.values():
        resolve_settings(settings, {"listen": ("unix:/a",), "coordinator": "unix:/c", "folder": "/f"}, {}, file)


def test_with_the_file_for_several_hosts_daemons_are_reached_by_others_and_know_the_secret(folder: Path) -> None:
    (text,) = [text for text in SETTINGS if "link_listen" in text]
    file = load_config_file(written(text, folder))
    coordinator = resolve_settings(DAEMONS["coordinator"], {}, {}, file)
    assert len(coordinator.secret) == 64 and not coordinator.insecure
    check_exposed(file.entries["coordinator"]["listen"], coordinator.secret, False)
    with pytest.raises(ValueError, match="can be reached from other hosts, and this job has no secret"):
        check_exposed(file.entries["coordinator"]["listen"], "", False)


def test_the_viewing_token_that_the_page_makes_is_one(folder: Path) -> None:
    assert len(read_viewing_token(folder / "viewing-token")) == 32


def test_the_client_token_that_the_page_makes_is_good_for_using_workers(folder: Path) -> None:
    (token,) = read_client_tokens(folder / "client-tokens")
    assert (token.name, token.access) == ("ci", AccessLevel.USE)


def test_ports_are_those_of_the_configuration() -> None:
    ports = re.findall(r"^\| (\d+(?:, \d+)*) \|", PAGE, re.MULTILINE)
    alone = [key.const for settings in DAEMONS.values() for key in list_settings(settings) if key.name == "metrics"]
    assert ports == [str(COORDINATOR_PORT), "7451", "7452", ", ".join(map(str, alone))]
    manifest = (ROOT / "deploy/kubernetes/base/networkpolicy.yaml").read_text()
    assert all(f"port: {port}" in manifest for row in ports for port in row.split(", "))


def test_numbers_of_the_threat_model_are_those_of_the_code() -> None:
    assert {int(bits) for bits in re.findall(r"(\d+) (?:random )?bits", MODEL)} == {
        8 * SESSION_ID_BYTES,
        8 * TOKEN_BYTES,
    }
    assert re.findall(r"after (\d+) s", MODEL) == [f"{HANDSHAKE_SECONDS:g}"]


def test_metrics_that_are_to_be_watched_exist() -> None:
    known = {*catalogue.WORKER_METRICS, *catalogue.COORDINATOR_METRICS}
    assert set(re.findall(r"`(collectived_\w+_(?:total|seconds|bytes))`", PAGE)) <= known


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/operate/security.md"])
def test_every_page_that_is_named_is_there(page: str) -> None:
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        assert (here / target).exists(), target
