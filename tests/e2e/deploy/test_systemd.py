"""The units: understood by systemd, closed as far as the page says, and in accord with the daemons."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.docs.blocks import claimed, taken_from
from tests.docs.own_root import run_as_root
from tests.e2e.deploy.commands import DEPLOY, INSTALLED_AT, ROOT, UNITS, sections, setting

from collectived_proto.config.sources import load_config_file
from collectived_proto.ipc import job_files

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(not ANALYZE, reason="systemd-analyze is not installed")
WORKER = DEPLOY / "systemd/collectived-worker@.service"
PAGE = ROOT / "docs/operate/systemd.md"
INSTALL, USE = (block.text for block in claimed(__file__))
INSTALLED_CONFIGURATION = ("/etc/collectived 755", "/etc/collectived/collectived.toml 644")
LATER = ("RestartSteps", "RestartMaxDelaySec")  # known from systemd 254 on


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert ANALYZE
    return subprocess.run([ANALYZE, *arguments], capture_output=True, text=True, timeout=30, check=False)


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.name))
def test_systemd_finds_no_fault(unit: Path, tmp_path: Path) -> None:
    program = tmp_path / "collectived"  # which is not installed where the unit looks for it
    program.touch(mode=0o755)
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(INSTALLED_AT, str(program)))
    said = analyze("verify", "--recursive-errors=no", str(copy)).stderr.splitlines()
    # Of other units of this machine it may complain too.
    ours = [line for line in said if "collectived" in line.replace(str(tmp_path), "") or str(copy) in line]
    assert [line for line in ours if not any(name in line for name in LATER)] == []


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.name))
def test_its_exposure_is_what_the_page_says(unit: Path) -> None:
    said = analyze("security", "--offline=true", "--no-pager", str(unit)).stdout
    (measured,) = re.findall(r"Overall exposure level for \S+: ([\d.]+)", said)
    (written,) = re.findall(rf"^\| `{re.escape(unit.name)}` \|.*\| ([\d.]+) \|$", PAGE.read_text(), re.MULTILINE)
    by = analyze("--version").stdout.split()[1]
    assert float(measured) <= 2.5
    if by == "252":  # another release weighs other things
        assert measured == written and f"systemd {by}" in PAGE.read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.name))
def test_it_is_started_again_and_the_secret_stays_with_root(unit: Path) -> None:
    assert setting(unit, "Restart") == ["on-failure"] and setting(unit, "User") == ["collectived"]
    assert setting(unit, "LoadCredential") == ["secret:/etc/collectived/secret"]
    assert "--secret-file=%d/secret" in setting(unit, "ExecStart")[0].split()
    assert set(sections(unit)) == {"[Unit]", "[Service]", "[Install]"}


def test_the_worker_serves_where_programs_look_and_its_group_may_look_in() -> None:
    (runtime,) = setting(WORKER, "RuntimeDirectory")
    assert Path("/run") / runtime == job_files.SYSTEM_FOLDER
    assert setting(WORKER, "RuntimeDirectoryMode") == ["0750"]
    assert f"--listen=unix:%t/{runtime}/{job_files.SYSTEM_SOCKET}" in setting(WORKER, "ExecStart")[0].split()


def test_the_worker_has_time_to_drain() -> None:
    (first,), (stop,) = setting(WORKER, "ExecStop"), setting(WORKER, "TimeoutStopSec")
    told = re.findall(r"--(?:timeout|drain-seconds)=(\d+)s", f"{first} {setting(WORKER, 'ExecStart')[0]}")
    assert len(told) == 2 and int(stop.removesuffix("s")) > max(map(int, told)) + 5


def test_arenas_follow_the_memory_that_the_unit_has() -> None:
    assert setting(WORKER, "MemoryMax") and "--memory-limit" not in setting(WORKER, "ExecStart")[0]


def test_the_configuration_beside_them_is_one() -> None:
    file = load_config_file(DEPLOY / "systemd/collectived.toml")
    assert {table: set(keys) for table, keys in file.entries.items() if table} == {
        "coordinator": {"listen"},
        "worker": {"coordinator", "link_listen"},
    }


@needs_systemd
def test_the_commands_of_the_page_install_them(tmp_path: Path) -> None:
    pip = f"{Path(INSTALLED_AT).parent}/pip install /path/to/this/repository"
    assert pip in INSTALL and "python3 -m venv /opt/collectived " in INSTALL
    # `make setup` and `make wheels` are proof that pip can do so; here it would take a minute.
    commands = INSTALL.replace(" venv ", " venv --without-pip ").replace(
        pip, f'ln -s "$(command -v collectived)" {INSTALLED_AT}'
    )
    names = [unit.name for unit in UNITS]
    script = f"""
        {commands}
        cd /etc/systemd/system
        stat --format='%n %a' {" ".join(names)} /etc/collectived /etc/collectived/collectived.toml
        id --user --name collectived; id --group --name collectived
        {ANALYZE} verify --recursive-errors=no {" ".join(names)} 2>&1 | grep collectived || true
    """
    lines = run_as_root(script, tmp_path, ROOT).splitlines()
    *installed, user, group = lines[: len(names) + 4]
    assert installed == [*(f"{name} 644" for name in names), *INSTALLED_CONFIGURATION]
    assert (user, group) == ("collectived", "collectived")
    assert [line for line in lines[len(names) + 4 :] if not any(name in line for name in LATER)] == []


@pytest.mark.timeout(120)
def test_programs_find_the_worker_by_the_lines_of_the_page(tmp_path: Path) -> None:
    ranks = [line.partition("#")[0].strip() for line in USE.splitlines()]
    folder = job_files.SYSTEM_FOLDER
    worker = f"collectived worker --task 0 --coordinator unix:/run/c.sock --folder {folder}"
    script = f"""
        cd "$OWN"; cat > mean.py <<'END'
{taken_from("README.md", "import collectived as cd")}END
        coproc COORDINATOR {{ exec collectived coordinator --attached --listen unix:/run/c.sock; }}
        echo >&"${{COORDINATOR[1]}}"; read -r -u "${{COORDINATOR[0]}}"
        coproc WORKER {{ exec {worker} --attached --listen unix:{folder}/{job_files.SYSTEM_SOCKET}; }} 2>/dev/null
        echo >&"${{WORKER[1]}}"; read -r -u "${{WORKER[0]}}"
        {ranks[0]} & first=$!
        {ranks[1]}
        wait $first
    """
    said = run_as_root(script, tmp_path)
    assert sorted(said.splitlines()) == [f"I am {rank} of 2, the mean is [0.5 0.5 0.5] and 0.5" for rank in range(2)]
