"""Every probe on the machine that the tests run on, and where that cannot show it, on a part made for it."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Signer, variables

from collectived_launcher.doctor import collect as gather_module
from collectived_launcher.doctor.collect import collect_facts, run_probes
from collectived_launcher.doctor.facts import Library, UnknownFact
from collectived_launcher.doctor.probes import gpus, network, software, system
from collectived_launcher.doctor.rules import software as judge_software
from collectived_launcher.doctor.rules import system as judge_system
from collectived_launcher.status import discovery
from collectived_proto.v1 import status_pb2
from collectived_runtime.worker.devices import default_memory_limit

PATIENCE = 30.0


def test_all_facts_of_this_machine_can_be_gathered() -> None:
    facts = collect_facts(os.environ, within=PATIENCE)
    assert [part for part in facts.__slots__ if isinstance(getattr(facts, part), UnknownFact)] == []


def test_certificates_are_those_of_the_environment_and_of_the_daemons_file(tmp_path: Path) -> None:
    signer = Signer(tmp_path)
    host, late = signer.issue("host", days=20), signer.expired("late")
    file = tmp_path / "collectived.toml"
    file.write_text(f'tls_cert = "{late.cert}"\ntls_key = "{late.key}"\ntls_ca = "{late.ca}"\n')
    mine, *daemons = software.probe_certificates({**variables(host), "COLLECTIVED_CONFIG": str(file)})
    assert (mine.path, mine.days_left, mine.trouble) == (str(host.cert), 19, "")
    assert [one.named_by for one in daemons] == [f"{file} for the coordinator", f"{file} for the worker"]
    assert all("certificate has expired" in one.trouble for one in daemons)
    assert software.probe_certificates({"COLLECTIVED_CONFIG": "none"}) == ()


def test_software_is_that_of_our_own_metadata() -> None:
    found = software.probe_software(PATIENCE)
    assert found.python == platform.python_version() and found.wanted_python == ">=3.11"
    libraries = {library.name: library for library in found.libraries}
    assert {"grpcio", "protobuf", "numpy", "ml-dtypes"} <= set(libraries)
    assert "torch" not in libraries, "of an extra"
    assert "examples" in found.extras and (found.cannot_load, found.slow_to_load) == ("", 0.0)


def test_what_a_daemon_cannot_load_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ml_dtypes.py").write_text("raise ImportError('no AVX here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = software.probe_software(PATIENCE)
    assert found.cannot_load == "ImportError: no AVX here"
    assert any("no AVX here" in finding.text for finding in judge_software.check_libraries(found))


def test_loading_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ml_dtypes.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = software.probe_software(0.5)
    assert (found.cannot_load, found.slow_to_load) == ("", 0.5)


def test_this_kernel_can_do_what_a_worker_needs() -> None:
    found = system.probe_kernel()
    assert (found.system, found.release) == ("Linux", platform.release())
    assert (found.memfd, found.pidfd, found.seqpacket) == ("", "", "")


def test_limits_are_those_of_this_process() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1000, hard), hard))
    try:
        assert system.probe_limits().descriptors == 1000
        assert [finding.grade.name for finding in judge_system.check_descriptors(system.probe_limits())] == ["WARNING"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_limits_are_found_where_no_descriptor_is_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        found = system.probe_limits()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.descriptors == 3 and found.tasks_left is None


def test_probes_leave_no_descriptor_open() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for look in (
        system.probe_kernel,
        system.probe_limits,
        system.probe_memory,
        system.probe_folder,
        system.probe_clock,
        network.probe_ports,
    ):
        look()
    network.probe_network({})
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_memory_is_in_the_bounds_of_the_machine() -> None:
    found = system.probe_memory()
    assert 0 < found.available <= found.total == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert found.limit is None or found.limit < found.total


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_the_socket_folder_as_it_is(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    missing = system.probe_folder()
    assert (missing.path, missing.owner, missing.parent_writable) == (f"{tmp_path}/collectived", None, True)
    assert not (tmp_path / "collectived").exists()
    (tmp_path / "collectived").mkdir()
    (tmp_path / "collectived").chmod(mode)
    found = system.probe_folder()
    assert (found.owner, found.mode, found.is_directory) == (os.getuid(), mode, True)


def test_the_loopback_is_among_the_interfaces_and_ssh_says_where_we_were_reached() -> None:
    found = network.probe_network({"SSH_CONNECTION": "10.0.0.9 5000 10.0.0.2 22"})
    assert "127.0.0.1" in [interface.address for interface in found.interfaces]
    assert found.hostname == socket.gethostname() and found.reached_at == "10.0.0.2"
    assert found.outward == "" or found.outward in [interface.address for interface in found.interfaces]


def test_an_interface_is_found_by_its_address() -> None:
    found = network.find_interface("127.0.0.1")
    assert found is not None and found.name == "lo"
    assert network.find_interface("192.0.2.250") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_listens_on_a_port_is_named(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        taken = listener.getsockname()[1]
        (port,) = network.probe_ports({taken: "coordinator"})
        assert port.holder is not None and port.holder.startswith(f"pid {os.getpid()}: ")
    (port,) = network.probe_ports({taken: "coordinator"})
    assert port.holder is None


def test_a_worker_that_has_ended_is_noticed_in_the_environment(tmp_path: Path) -> None:
    found = software.probe_environment({"COLLECTIVED_WORKER": f"unix:{tmp_path}/w.sock", "HOME": "/", "RANK": "0"})
    assert found.worker_is_there is False and set(found.variables) == {"COLLECTIVED_WORKER", "RANK"}
    (tmp_path / "w.sock").touch()
    assert software.probe_environment({"COLLECTIVED_WORKER": f"unix:{tmp_path}/w.sock"}).worker_is_there is True
    assert software.probe_environment({"COLLECTIVED_WORKER": "host:7451"}).worker_is_there is None


@pytest.mark.parametrize("name", ["SECRET", "JOB_SECRET", "DOCTOR_TOKEN", "PASSWORD_OF_TOMORROW"])
def test_of_a_variable_that_may_be_secret_it_is_told_only_that_it_is_set(name: str) -> None:
    found = software.probe_environment({f"COLLECTIVED_{name}": "value", "COLLECTIVED_TIMEOUT": "5"})
    assert found.variables == {f"COLLECTIVED_{name}": "(set)", "COLLECTIVED_TIMEOUT": "5"}


def test_without_a_folder_no_job_runs(tmp_path: Path) -> None:
    assert software.probe_running_jobs(str(tmp_path / "collectived"), {}) == ()


def test_a_worker_that_nobody_serves_is_a_job_with_trouble(tmp_path: Path) -> None:
    (job,) = software.probe_running_jobs(str(tmp_path / "none"), {"COLLECTIVED_WORKER": f"unix:{tmp_path}/w.sock"})
    assert "no worker answered" in job.trouble


@pytest.mark.parametrize("limits", [{"unit/memory.max": 4 << 30}, {"memory.max": 2 << 30}, {"unit/memory.max": "max"}])
def test_doctor_and_worker_agree_on_what_a_worker_takes(tmp_path: Path, limits: dict[str, Any]) -> None:
    cgroups, own = tmp_path / "cgroup", tmp_path / "own"
    (cgroups / "unit").mkdir(parents=True)
    own.write_text("0::/unit\n")
    for file, limit in limits.items():
        (cgroups / file).write_text(f"{limit}\n")
    found = system.probe_memory(cgroups, own)
    seen = found.total if found.seen_limit is None else min(found.total, found.seen_limit)
    assert abs(seen // 2 - default_memory_limit(cgroups, own)) < 1 << 20


@pytest.mark.parametrize("warnings", [["the coordinator at h:1 does not answer"], []])
def test_what_an_answer_without_a_coordinator_lacks_is_a_fact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    reply = status_pb2.StatusReply(answered_by="worker 0", warnings=warnings)
    monkeypatch.setattr(discovery, "request_status", lambda target: reply)
    (job,) = software.probe_running_jobs(str(tmp_path / "none"), {"COLLECTIVED_WORKER": "h:1"})
    assert len(job.missing) == 1 and "coordinator" in job.missing[0]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A driver made for tests; a machine with a real one is asked by the same calls."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) is installed, and so no NVML can be made for this test")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parents[3] / "fakes" / "nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True)
    return folder


def test_devices_and_versions_are_read(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    found = gpus.probe_gpus(gpus.query_libraries(PATIENCE), {"CUDA_VISIBLE_DEVICES": "1"})
    assert (found.driver, found.cuda, found.chosen) == ("580.65.06", "12.4", "1")
    assert [(gpu.index, gpu.name, gpu.uuid, gpu.memory >> 30) for gpu in found.devices] == [
        (0, "NVIDIA H100", "GPU-1", 80),
        (1, "NVIDIA H100", "GPU-2", 80),
    ]


def test_a_driver_that_refuses_is_quoted(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("REFUSES", "1")
    assert gpus.query_libraries(PATIENCE)["trouble"] == "NVML: Driver/library version mismatch"


def test_a_driver_that_hangs_is_given_up(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("HANGS", "1")
    assert gpus.query_libraries(0.5)["trouble"] == "the NVIDIA driver does not answer within 0.5 s"


def test_nccl_is_what_is_installed() -> None:
    found = gpus.probe_nccl({"nccl": "2.28.9"}, {"COLLECTIVED_NCCL": "cupy"})
    assert (found.wanted, found.version) == ("cupy", "2.28.9")
    assert set(found.bindings) <= {"nccl4py", "cupy", "pynccl"}


def test_a_look_that_hangs_or_fails_spoils_no_other() -> None:
    never = threading.Event()

    def fails() -> None:
        raise PermissionError(13, "not yours")

    try:
        found = run_probes({"hangs": never.wait, "fails": fails, "works": lambda: 7}, 0.2)
    finally:
        never.set()
    assert found["works"] == 7
    assert found["hangs"] == UnknownFact("nothing came back within 0.2 s")
    assert found["fails"] == UnknownFact("PermissionError: [Errno 13] not yours")


def test_who_waits_long_hears_for_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "SLOW_NOTICE_SECONDS", 0.02)
    heard = threading.Event()
    late: list[str] = []

    def still(names: list[str]) -> None:
        late.extend(names)
        heard.set()

    run_probes({"late": lambda: heard.wait(PATIENCE), "early": lambda: 7}, PATIENCE, still)
    assert "late" in late


def test_a_library_that_is_missing_has_no_version() -> None:
    assert Library("no-such-library", None, "").installed is software._installed_version("no-such-library")


def test_the_process_that_loads_libraries_of_gpus_imports_nothing_dear() -> None:
    """It is started anew each time."""
    line = [sys.executable, "-c", "import sys, collectived_launcher.doctor.probes.gpus; print('grpc' in sys.modules)"]
    assert subprocess.run(line, capture_output=True, text=True, check=True).stdout == "False\n"


def test_where_descriptors_are_short_the_kernel_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def short() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(system, "_make_arena", short)
    found = run_probes({"kernel": system.probe_kernel}, PATIENCE)["kernel"]
    assert isinstance(found, UnknownFact) and "Too many open files" in found.why
