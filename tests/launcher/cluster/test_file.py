"""The cluster file: what it says, and what it cannot say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from collectived_launcher.cluster.file import Cluster, ClusterFileError, read_cluster
from collectived_launcher.cluster.spec import Spec


def cluster(folder: Path, text: str) -> Cluster:
    path = folder / "lab.toml"
    path.write_text(text)
    return read_cluster(path)


def test_a_short_file(tmp_path: Path) -> None:
    found = cluster(tmp_path, 'hosts = ["a:2", "me@b"]')
    assert (found.name, found.coordinator_host, found.has_remote_hosts) == ("lab", "a", True)
    assert [(host.login, host.slots, list(found.get_tasks(host))) for host in found.hosts] == [
        ("a", 2, [0]),
        ("me@b", 1, [1]),
    ]
    assert not cluster(tmp_path, 'hosts = ["localhost"]').has_remote_hosts


def test_a_file_with_everything(tmp_path: Path) -> None:
    text = """
name = "train"
coordinator_host = "b"
coordinator_port = 17450
restarts = 2
[[hosts]]
name = "a"
workers = 2
[[hosts]]
name = "b"
user = "me"
address = "10.0.0.2"
slots = 4
[coordinator]
heartbeat_seconds = "2s"
[worker]
memory_limit = "1GiB"
insecure = false
"""
    found = cluster(tmp_path, text)
    assert (found.coordinator_flags, found.worker_flags) == (
        ("--heartbeat-seconds=2s",),
        ("--memory-limit=1GiB", "--no-insecure"),
    )
    assert [list(found.get_tasks(host)) for host in found.hosts] == [[0, 1], [2]]
    assert (found.hosts[1].login, found.hosts[1].address, found.restarts) == ("me@b", "10.0.0.2", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the hosts are needed"),
        ("hosts = []", "the hosts are needed"),
        ('hosts = ["a", "a"]', "lab.toml:1: 'a' is named twice"),
        ('hosts = ["-oProxyCommand=x"]', "'-oProxyCommand=x' is no host"),
        ('hosts = ["-F@b"]', "'-F@b' is no host"),
        ('[[hosts]]\nname = "-F/tmp/x"', "'-F/tmp/x' is no host: expected names of a host and a user"),
        ('[[hosts]]\nname = "b"\nuser = "-oProxyCommand"', "'-oProxyCommand@b' is no host"),
        ('hosts = ["a:none"]', "'a:none' is no host: expected NAME, USER@NAME or NAME:CLIENTS"),
        ('hosts = ["a"]\nhots = 3', "lab.toml:2: there is no key 'hots': did you mean 'hosts'?"),
        ('hosts = ["a"]\ncoordinator_host = "aa"', "lab.toml:2: 'aa' is none of the hosts: did you mean 'a'?"),
        ('hosts = ["a"]\nname = "a/b"', "lab.toml:2: 'a/b' is no name"),
        ('[[hosts]]\nname = "a"\nslot = 3', "there is no key 'slot' in [hosts]: did you mean 'slots'?"),
        ('[[hosts]]\nname = "a"\nslots = 0', "slots = 0 of a host is not 1 or more"),
        (
            'hosts = ["a"]\n[worker]\nmemory_limit = "64MB"',
            "lab.toml:3: worker.memory_limit: '64MB' is not a number with",
        ),
        ('hosts = ["a"]\n[worker]\nmemory_limt = 3', "in [worker]: did you mean 'memory_limit'?"),
        ('hosts = ["a"]\n[worker]\ntask = 3', "lab.toml:3: worker.task cannot be set here: `collectived up` sets it"),
        (
            'hosts = ["a"]\n[worker]\ndrain_seconds = "6min"',
            "lab.toml:3: worker.drain_seconds: '6min' is longer than 300 s (5min), which `down` waits for",
        ),
        ('hosts = ["a"]\ntls_cert = "tls.crt"', "lab.toml:2: tls_cert = 'tls.crt': expected an absolute path"),
        ('tls_ca = 3\nhosts = ["a"]', "lab.toml:1: tls_ca = 3 is no text"),
        ("hosts = ", "lab.toml is no TOML"),
    ],
)
def test_what_a_file_cannot_say(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterFileError, match=re.escape(message)):
        cluster(tmp_path, text)


def test_certificates_are_told_to_all_daemons_unless_a_kind_has_its_own(tmp_path: Path) -> None:
    text = 'hosts = ["a"]\ntls_cert = "/t/tls.crt"\ntls_key = "/t/tls.key"\n[worker]\ntls_cert = "/w/tls.crt"\n'
    found = cluster(tmp_path, text)
    assert found.coordinator_flags == ("--tls-cert=/t/tls.crt", "--tls-key=/t/tls.key")
    assert found.worker_flags == (*found.coordinator_flags, "--tls-cert=/w/tls.crt")


def test_a_spec_is_the_same_when_it_is_read_again() -> None:
    spec = Spec(
        "lab", "a", (0, 1), True, "10.0.0.1:7450", "10.0.0.1", ("--tune",), ("--memory-limit=1GiB",), 3, "lab.toml"
    )
    assert Spec.from_json(spec.to_json()) == spec
    names = [name for name, _ in spec.build_daemon_commands(Path("/run/x"))]
    assert names == ["coordinator", "worker 0", "worker 1"]
    words = dict(spec.build_daemon_commands(Path("/run/x")))["worker 1"]
    assert words[words.index("--coordinator") + 1] == "unix:/run/x/coordinator.sock"
    assert words[words.index("--link-listen") + 1] == "10.0.0.1:0"
