"""Each judgement, on facts that nobody needs to have: what is wrong is said with its figure, and with what to do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.launcher.doctor import healthy_facts as sound

from collectived_launcher.doctor.checks import CHECKS, PAIRWISE_CHECKS, evaluate_checks, evaluate_measurement
from collectived_launcher.doctor.facts import (
    Certificate,
    Facts,
    GpuFacts,
    Gpus,
    InterfaceFacts,
    Port,
    RunningJob,
    UnknownFact,
)
from collectived_launcher.doctor.finding import Finding, Grade, failure, ok, worst_grade
from collectived_launcher.doctor.rules.gpus import select_visible

OK, WARNING, FAILURE = Grade


def judged(check: str, **parts: Any) -> list[Finding]:
    return [finding for finding in evaluate_checks(replace(sound.SOUND, **parts)) if finding.check == check]


def spoilt(part: str, **fields: Any) -> dict[str, Any]:
    return {part: replace(getattr(sound.SOUND, part), **fields)}


def variables(**values: str) -> dict[str, Any]:
    return spoilt("environment", variables=values)


def with_gpus(nccl: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return {"gpus": replace(sound.H100, **fields), **spoilt("nccl", **(nccl or {}))}


def test_a_sound_host_has_a_line_per_check_and_all_are_well() -> None:
    findings = evaluate_checks(sound.SOUND)
    assert worst_grade(findings) is OK
    assert {finding.check for finding in findings} == {check.name for check in CHECKS} | {"clock skew"}


CASES = [
    ("python", spoilt("software", python="3.10.12"), FAILURE, "3.10.12, and >=3.11 is needed", "Python >=3.11"),
    (
        "libraries",
        spoilt("software", libraries=(replace(sound.SOFTWARE.libraries[0], installed="1.60.0"),)),
        FAILURE,
        "grpcio: 1.60.0 is installed, and >=1.74 is needed",
        'pip install --upgrade "grpcio>=1.74"',
    ),
    (
        "libraries",
        spoilt("software", libraries=(replace(sound.SOFTWARE.libraries[1], installed=None),)),
        FAILURE,
        "numpy: it is not installed",
        'pip install --upgrade "numpy>=2.0"',
    ),
    (
        "libraries",
        spoilt("software", cannot_load="ImportError: libstdc++.so.6"),
        FAILURE,
        "cannot load them: ImportError: libstdc++.so.6",
        "fresh environment",
    ),
    ("libraries", spoilt("software", slow_to_load=15.0), WARNING, "not loaded them within 15 s", "disk of this host"),
    (
        "kernel",
        spoilt("kernel", system="Darwin"),
        FAILURE,
        "daemons run on Linux alone",
        "COLLECTIVED_WORKER=host:port",
    ),
    ("memfd", spoilt("kernel", memfd="[Errno 22] Invalid argument"), FAILURE, "Errno 22", "Linux 5.1"),
    ("pidfd", spoilt("kernel", pidfd="[Errno 1] Operation not permitted"), FAILURE, "Errno 1", "pidfd_open"),
    ("pidfd", spoilt("kernel", peer_pidfd="[Errno 92]"), OK, "SO_PEERPIDFD, since Linux 6.5, does not", ""),
    ("sockets", spoilt("kernel", seqpacket="[Errno 93]"), FAILURE, "Errno 93", "SCM_RIGHTS"),
    ("descriptors", spoilt("limits", descriptors=256), WARNING, "only 256 files", "ulimit -n 65536"),
    ("descriptors", spoilt("limits", descriptors=32), FAILURE, "only 32 files", "LimitNOFILE=65536"),
    ("descriptors", spoilt("limits", descriptors=256, descriptors_most=4096), WARNING, "only 256", "ulimit -n 4096"),
    ("descriptors", spoilt("limits", descriptors=32, descriptors_most=32), FAILURE, "only 32", "limits.conf"),
    ("descriptors", spoilt("limits", descriptors=None), OK, "no limit", ""),
    ("locked memory", spoilt("limits", locked=8 << 20), OK, "8 MiB; not needed", ""),
    (
        "locked memory",
        {**spoilt("limits", locked=8 << 20), "gpus": replace(sound.H100, rdma=("mlx5_0",))},
        WARNING,
        "8 MiB may be locked, and NCCL locks what it sends by mlx5_0",
        "ulimit -l unlimited",
    ),
    ("locked memory", {"gpus": replace(sound.H100, rdma=("mlx5_0",))}, OK, "no limit, as NCCL needs it", ""),
    ("processes", spoilt("limits", tasks_left=100), WARNING, "only 100 more", "pids.max"),
    ("processes", spoilt("limits", tasks_left=3), FAILURE, "only 3 more", "--pids-limit"),
    ("processes", spoilt("limits", tasks_left=5000), OK, "5000 more", ""),
    ("memory", spoilt("memory", available=700 << 20), WARNING, "700 MiB of 64 GiB", "MemoryMax="),
    ("memory", spoilt("memory", available=100 << 20, limit=1 << 30), FAILURE, "100 MiB of 1024 MiB", "--memory"),
    (
        "memory",
        spoilt("memory", available=4 << 30, limit=4 << 30),
        WARNING,
        "a worker takes up to 32 GiB, which is more than there is",
        f"--memory-limit {2 << 30}",
    ),
    ("memory", spoilt("memory", seen_limit=8 << 30), OK, "a worker takes up to 4096 MiB", ""),
    ("socket folder", spoilt("folder", mode=0o755), FAILURE, "mode 0755", "chmod 700 /run/user/7/collectived"),
    ("socket folder", spoilt("folder", owner=8), FAILURE, "belongs to uid 8, you are 7", "XDG_RUNTIME_DIR"),
    ("socket folder", spoilt("folder", is_directory=False), FAILURE, "is no directory", "XDG_RUNTIME_DIR"),
    (
        "socket folder",
        spoilt("folder", longest_socket=130),
        FAILURE,
        "130 bytes, the kernel allows 107",
        "shorter path",
    ),
    ("socket folder", spoilt("folder", owner=None, mode=None), OK, "made with mode 0700 when it is needed", ""),
    (
        "socket folder",
        spoilt("folder", owner=None, mode=None, parent_writable=False),
        FAILURE,
        "you may not make it",
        "XDG_RUNTIME_DIR",
    ),
    (
        "environment",
        spoilt("environment", variables={"COLLECTIVED_WORKER": "unix:/gone"}, worker_is_there=False),
        FAILURE,
        "COLLECTIVED_WORKER=unix:/gone names a socket that is not there",
        "unset COLLECTIVED_WORKER",
    ),
    ("environment", variables(COLLECTIVED_TIMEOUT="soon"), FAILURE, "'soon' is not a time", "COLLECTIVED_TIMEOUT=60"),
    ("environment", variables(COLLECTIVED_NCCL="rccl"), FAILURE, "'rccl' is no binding", "nccl4py|cupy|pynccl"),
    ("environment", variables(RANK="4", WORLD_SIZE="4"), FAILURE, "RANK=4 is no rank of WORLD_SIZE=4", "unset both"),
    ("environment", variables(RANK="one", WORLD_SIZE="4"), FAILURE, "RANK=one is no rank", "unset both"),
    ("environment", variables(RANK="0"), WARNING, "RANK is set and WORLD_SIZE is not", "unset RANK"),
    ("environment", variables(RANK="0", WORLD_SIZE="2"), OK, "set: RANK, WORLD_SIZE", ""),
    ("gpus", {}, OK, "no GPU here", ""),
    ("gpus", with_gpus(), OK, "driver 580.65.06 (CUDA 13.0); 2 of 2 visible: 0 NVIDIA H100 80 GiB, 1", ""),
    ("gpus", with_gpus(chosen="1"), OK, "1 of 2 visible (CUDA_VISIBLE_DEVICES=1): 1 NVIDIA H100 80 GiB", ""),
    ("gpus", with_gpus(chosen=""), WARNING, "0 of 2 visible", "unset CUDA_VISIBLE_DEVICES"),
    ("gpus", with_gpus(devices=()), WARNING, "0 of 0 visible", "--gpus all"),
    ("gpus", with_gpus(cuda="11.4"), WARNING, "CUDA 11.4", "CUDA 12 or newer"),
    (
        "gpus",
        {"gpus": Gpus(cards=1, trouble="NVML: Driver/library version mismatch")},
        WARNING,
        "1 NVIDIA card, and no driver that answers: NVML: Driver/library version mismatch",
        "nvidia-smi",
    ),
    ("nccl", spoilt("nccl", bindings={}), OK, "not needed: no GPU here", ""),
    ("nccl", with_gpus(), OK, "nccl4py 0.6.0 (by default), libnccl 2.28.9", ""),
    ("nccl", with_gpus({"bindings": {}}), WARNING, "no binding of NCCL", "pip install nccl4py nvidia-nccl-cu13"),
    (
        "nccl",
        with_gpus({"wanted": "cupy"}, cuda="12.4"),
        FAILURE,
        "COLLECTIVED_NCCL=cupy, which is not installed",
        "pip install cupy-cuda12x nvidia-nccl-cu12, or unset COLLECTIVED_NCCL",
    ),
    (
        "nccl",
        {**with_gpus({"bindings": {}}), **spoilt("software", extras=("cuda13",))},
        WARNING,
        "no binding of NCCL",
        'pip install "collectived[cuda13]"',
    ),
    ("nccl", with_gpus({"version": ""}), WARNING, "finds no libnccl.so.2", "pip install nvidia-nccl-cu13"),
    ("nccl", with_gpus({"version": "2.19.3"}), WARNING, "2.19.3, which is too old", "nvidia-nccl-cu13>=2.28"),
    ("interfaces", {}, OK, "eth0 10.0.0.2 (10 Gbit/s); other hosts are reached by eth0", ""),
    ("interfaces", spoilt("network", interfaces=()), FAILURE, "not even the loopback", "ip link set lo up"),
    ("interfaces", spoilt("network", interfaces=(InterfaceFacts("lo", "::1"),)), OK, "none to reach others by", ""),
    ("interfaces", spoilt("network", outward=""), OK, "no way to hosts of other networks", ""),
    ("ports", {}, OK, "7450, 7451 are free", ""),
    (
        "ports",
        {"ports": (Port(7450, "coordinator", "pid 9: python -m collectived_runtime coordinator", True),)},
        OK,
        "7450 (coordinator) is held by pid 9",
        "",
    ),
    ("ports", {"ports": (Port(7450, "coordinator", "pid 9: nginx"),)}, WARNING, "pid 9: nginx", "another port"),
    ("ports", {"ports": (Port(7450, "coordinator", ""),)}, WARNING, "a process of somebody else", "another port"),
    ("clock", spoilt("clock", kept=False), OK, "no time service keeps it", ""),
    ("clock", spoilt("clock", kept=None), OK, "does not say", ""),
    ("running job", {"jobs": ()}, OK, "you have none running on this host", ""),
    ("running job", {}, OK, "user-1-ab answers; all of it runs collectived 0.1.0", ""),
    (
        "running job",
        {"jobs": (RunningJob("j", trouble="no worker answered\n    unix:/w: DEADLINE_EXCEEDED"),)},
        WARNING,
        "j does not answer: no worker answered unix:/w: DEADLINE_EXCEEDED",
        "end its launcher",
    ),
    (
        "running job",
        {"jobs": (replace(sound.JOB, releases={"coordinator": "0.2.0", "worker 0": "0.1.3"}),)},
        WARNING,
        "other releases than this one (0.1.0): coordinator 0.2.0",
        "which collectived",
    ),
    (
        "running job",
        {"jobs": (replace(sound.JOB, releases={"coordinator": "0.3.0"}),)},
        FAILURE,
        "coordinator 0.3.0",
        "which collectived",
    ),
    (
        "running job",
        {"jobs": (replace(sound.JOB, missing=("the coordinator at h:1 does not answer",)),)},
        WARNING,
        "user-1-ab answers in part: the coordinator at h:1 does not answer",
        "collectived status",
    ),
    (
        "certificates",
        {"certificates": (Certificate("the environment", "/c/tls.crt", 300), Certificate("file", "/d/tls.crt", 12))},
        WARNING,
        "/d/tls.crt (named by file) expires in 12 days",
        "collectived certs renew",
    ),
    ("certificates", {"certificates": (Certificate("file", "/c", 300),)}, OK, "is good for 300 days", ""),
    ("certificates", {"certificates": (Certificate("file", "/c"),)}, OK, "/c (named by file) can be used", ""),
    ("certificates", {"certificates": (Certificate("file", "/c", 0),)}, WARNING, "in less than a day", "renew"),
    (
        "certificates",
        {"certificates": (Certificate("file", "/c", trouble="--tls-key /k: cannot be read"),)},
        FAILURE,
        "--tls-key /k: cannot be read",
        "named by file",
    ),
    ("clock skew", {"jobs": (replace(sound.JOB, ahead=-0.5),)}, WARNING, "500.0 ms behind that of this host", "chrony"),
]


@pytest.mark.parametrize(("check", "parts", "grade", "text", "remedy"), CASES)
def test_what_is_said(check: str, parts: dict[str, Any], grade: Grade, text: str, remedy: str) -> None:
    findings = judged(check, **parts)
    assert any(finding.grade is grade and text in finding.text and remedy in finding.remedy for finding in findings), (
        findings
    )


def test_no_skew_is_told_from_an_answer_that_was_kept_back() -> None:
    assert judged("clock skew", jobs=(replace(sound.JOB, ahead=-0.6, missing=("the coordinator",)),)) == []
    (finding,) = judged("clock skew", jobs=(replace(sound.JOB, ahead=-0.6, round_trip=0.7),))
    assert finding.grade is OK and "took 700.0 ms to answer, which is too long" in finding.text


def test_every_check_that_can_fail_or_warn_does_so_in_a_case() -> None:
    """`kernel` to `running job`; a clock by itself hurts nobody, and no GPU is no trouble."""
    spoken = {check for check, _, grade, *_ in CASES if grade is not OK}
    assert {check.name for check in CHECKS} - spoken == {"clock"}


@pytest.mark.parametrize(
    ("fields", "check", "grade", "text", "remedy"),
    [
        ({}, "reach", OK, "10.0.0.3:4000 answers within 0.20 ms, by eth0 10.0.0.2 (10 Gbit/s)", ""),
        ({}, "bandwidth", OK, "1.10 GB/s there, 1.00 GB/s back", ""),
        ({}, "clock skew", OK, "b's clock is 1.0 ms ahead of that of this host (± 0.1 ms)", ""),
        ({}, "versions", OK, "b has the same: collectived 0.1.0", ""),
        ({"peer": None, "trouble": "Connection refused"}, "reach", FAILURE, "Connection refused", "firewall"),
        ({"peer": None, "trouble": "another token", "refused": True}, "reach", FAILURE, "another token", "anew"),
        ({"round_trip": 0.03}, "reach", WARNING, "within 30.00 ms", "one network"),
        ({"sent_per_second": 0.4e9}, "bandwidth", WARNING, "less than half of the 10 Gbit/s of eth0", "ethtool"),
        ({"interface": None, "sent_per_second": 11e6}, "bandwidth", WARNING, "11.0 MB/s there", "faster network"),
        ({"ahead": 3.0}, "clock skew", WARNING, "3000.0 ms ahead of that of this host", "set-ntp"),
        ({"ahead": 0.12, "round_trip": 0.1}, "clock skew", OK, "120.0 ms ahead", ""),
        (
            {"peer": replace(sound.PEER, release="0.2.1")},
            "versions",
            WARNING,
            "0.2.1, this host 0.1.0",
            "0.2.1 on both",
        ),
        ({"peer": replace(sound.PEER, release="1.0.0")}, "versions", FAILURE, "1.0.0", "1.0.0 on both"),
        ({"peer": replace(sound.PEER, python="3.13.0")}, "versions", WARNING, "Python 3.13.0", "same Python"),
        (
            {"peer": replace(sound.PEER, libraries={"numpy": "2.0.1"})},
            "versions",
            WARNING,
            "numpy 2.0.1",
            "numpy==2.4.6",
        ),
    ],
)
def test_what_is_said_of_another_host(fields: dict[str, Any], check: str, grade: Grade, text: str, remedy: str) -> None:
    findings = list(evaluate_measurement(replace(sound.MEASURED, **fields), sound.SOUND, "b"))
    assert {finding.check for finding in findings} <= set(PAIRWISE_CHECKS)
    assert {finding.host for finding in findings} == {"b"}
    (finding,) = [finding for finding in findings if finding.check == check]
    assert (finding.grade, text in finding.text, remedy in finding.remedy) == (grade, True, True), finding


def test_what_could_not_be_looked_at_is_a_warning_of_every_check_that_needs_it() -> None:
    findings = evaluate_checks(replace(sound.SOUND, gpus=UnknownFact("nothing came back within 10 s")))
    concerned = [finding for finding in findings if finding.grade is WARNING]
    assert [finding.check for finding in concerned] == ["locked memory", "gpus", "nccl"]
    assert all("nothing came back within 10 s" in finding.text for finding in concerned)


def test_a_finding_that_is_not_ok_says_what_to_do_and_none_else() -> None:
    assert ok("python", "fine").remedy == ""
    with pytest.raises(ValueError, match="a remedy belongs to"):
        failure("python", "bad", "")
    with pytest.raises(ValueError, match="a remedy belongs to"):
        Finding("python", OK, "fine", "do something")


def test_remedies_name_no_command_of_ours_that_there_is_not() -> None:
    from collectived_launcher.__main__ import collectived

    remedies = [found.remedy for _, parts, *_ in CASES for found in evaluate_checks(replace(sound.SOUND, **parts))]
    named = {word for remedy in remedies for word in re.findall(r"`collectived (\w+)", remedy)}
    assert named and named <= set(collectived.commands)


GPUS = (GpuFacts(0, "x", "GPU-aa1", 1), GpuFacts(1, "x", "GPU-ab2", 1), GpuFacts(2, "x", "GPU-ac3", 1))


@pytest.mark.parametrize(
    ("chosen", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("GPU-ab", [1]),
        ("GPU-a", []),
        ("1,1", [1]),
    ],
)
def test_which_gpus_a_program_sees(chosen: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in select_visible(GPUS, chosen)] == indices


def test_every_part_of_the_facts_is_judged_by_somebody() -> None:
    assert {part for check in CHECKS for part in check.fact_names} == set(Facts.__slots__)
