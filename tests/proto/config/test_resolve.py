"""File < environment < flags: one value, and for each key where it came from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from collectived_proto.config import flags as command_line
from collectived_proto.config.daemons import DAEMONS, CoordinatorSettings, DaemonSettings, WorkerSettings
from collectived_proto.config.resolve import resolve_settings, resolve_values
from collectived_proto.config.settings import REQUIRED, Setting, list_settings
from collectived_proto.config.sources import ConfigError, ConfigFile, find_config_file, load_config_file

PLACE = {"task": "0", "coordinator": "unix:/c", "folder": "/run/x"}
EVERYWHERE = [(settings, key) for settings in DAEMONS.values() for key in list_settings(settings)]
SECRET = "s3cret-of-these-tests"
NAMED = {"log_level": "info", "log_format": "json", "nccl": "cupy", "secret": SECRET}
SAMPLES = {
    "[host:]port": "9450",
    "time": "250ms",
    "size": "3MiB",
    "whole number": "7",
    "address": "unix:/a",
    "addresses": "unix:/a",
    "rules": "night/* = user:ann token:ci",
}


def written(folder: Path, text: str) -> ConfigFile:
    path = folder / "c.toml"
    path.write_text(text)
    return load_config_file(path)


def worker(file: ConfigFile | None = None, environment: dict[str, str] | None = None, **flags: str) -> WorkerSettings:
    return resolve_settings(WorkerSettings, {**PLACE, **flags}, environment or {}, file)


@pytest.mark.parametrize(("settings", "key"), EVERYWHERE, ids=lambda one: getattr(one, "path", ""))
def test_every_key_can_be_given_everywhere(tmp_path: Path, settings: type[DaemonSettings], key: Setting) -> None:
    word = NAMED.get(key.name) or SAMPLES.get(key.value_type.name, "true" if key.value_type.is_boolean else "/a")
    if key.name == "secret_file":
        (tmp_path / "secret").write_text(SECRET)
        (tmp_path / "secret").chmod(0o600)
        word = str(tmp_path / "secret")
    expected = key.value_type.parse(word)
    by_variable = resolve_values(settings, {}, {key.variable: word}, None)
    assert (by_variable.values[key.name], by_variable.origins[key.name]) == (expected, key.variable)
    if key.is_secret:
        return
    by_flag = resolve_values(settings, {key.name: word}, {key.variable: "nonsense"}, None)
    assert (by_flag.values[key.name], by_flag.origins[key.name]) == (expected, f"--{key.name.replace('_', '-')}")
    head = f"[{key.table}]\n" if key.table else "# a line\n"
    by_file = resolve_values(
        settings, {}, {}, written(tmp_path, f"{head}{key.name} = {key.value_type.to_toml(expected)}\n")
    )
    assert (by_file.values[key.name], by_file.origins[key.name]) == (expected, f"{tmp_path}/c.toml:2")


def test_flags_go_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, 'job = "filed"\n[worker]\nmemory_limit = "1MiB"\ndrain_seconds = 3\n')
    found = worker(file, {"COLLECTIVED_WORKER_MEMORY_LIMIT": "2MiB"}, drain_seconds="4s")
    assert (found.job, found.memory_limit, found.drain_seconds) == ("filed", 2 << 20, 4.0)


def test_what_both_daemons_have_may_stand_in_the_table_of_one(tmp_path: Path) -> None:
    file = written(tmp_path, 'log_level = "info"\n[worker]\nlog_level = "debug"\n')
    assert worker(file).log_level == "debug"
    assert resolve_settings(CoordinatorSettings, {"listen": ["unix:/c"]}, {}, file).log_level == "info"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[worker]\nmemory_limt = 3",
            "c.toml:2: there is no key 'memory_limt' in [worker]: did you mean 'memory_limit'?",
        ),
        ("jab = 3", "c.toml:1: there is no key 'jab' before the first table: did you mean 'job'?"),
        ("drain_seconds = 3", "there is no key 'drain_seconds' before the first table: it belongs into [worker]"),
        ("\n[wurker]\ntask = 3", "c.toml:2: there is no table [wurker]: did you mean 'worker'?; tables: "),
        ('secret = "x"', "c.toml:1: 'secret' must not stand in a file that others may read: "),
        ("job = ", "c.toml is no TOML: "),
    ],
)
def test_what_a_file_cannot_say(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        written(tmp_path, text)


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (
            {},
            {"COLLECTIVED_WORKER_MEMORY_LIMIT": "64MB"},
            "worker.memory_limit, from COLLECTIVED_WORKER_MEMORY_LIMIT: '64MB' is not a number with B, KiB, ",
        ),
        ({"drain_seconds": "-1"}, {}, "worker.drain_seconds, from --drain-seconds: '-1' is not a number of seconds"),
        ({"log_level": "loud"}, {}, "log_level, from --log-level: 'loud' is not one of debug, info, warning, error"),
        ({"listen": "here"}, {}, "worker.listen, from --listen: 'here' is not unix:/path or host:port"),
        ({"insecure": "maybe"}, {}, "insecure, from --insecure: 'maybe' is not true or false"),
        (
            {},
            {"COLLECTIVED_WORKER_FOLDR": "x"},
            "no variable COLLECTIVED_WORKER_FOLDR of the environment: did you mean 'COLLECTIVED_WORKER_FOLDER'?",
        ),
    ],
)
def test_a_bad_value_is_named_with_its_key_and_where_it_came_from(
    flags: dict[str, str], variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        worker(None, variables, **flags)


def test_a_key_that_is_needed_says_how_to_give_it() -> None:
    with pytest.raises(
        ConfigError, match=r"worker\.coordinator is needed: .*give --coordinator, set COLLECTIVED_COORDINATOR, or wr"
    ):
        resolve_settings(WorkerSettings, {}, {}, None)
    assert [key.name for key in resolve_values(WorkerSettings, {}, {}, None).missing] == [
        key.name for key in list_settings(WorkerSettings) if key.default is REQUIRED
    ]


def test_the_secret_is_read_from_its_file_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    found = worker(None, {"COLLECTIVED_SECRET": "other"}, secret_file=str(path))
    assert found.secret == SECRET and SECRET not in repr(found)
    path.chmod(0o604)
    with pytest.raises(ConfigError, match=r"has mode 0604, by which all users of the host can read it: chmod 600"):
        worker(secret_file=str(path))
    assert resolve_settings(WorkerSettings, {**PLACE, "secret_file": ""}, {}, None, SECRET).secret == SECRET


def test_a_secret_of_few_characters_is_refused_wherever_it_comes_from_and_not_shown(tmp_path: Path) -> None:
    path, short = tmp_path / "secret", SECRET[:15]
    path.write_text(f"{short}\n")
    path.chmod(0o600)
    ways: list[tuple[dict[str, str], dict[str, str], str | None]] = [
        ({}, {}, short),
        ({}, {"COLLECTIVED_SECRET": short}, None),
        ({"secret_file": str(path)}, {}, None),
    ]
    for (flags, environment, said), origin in zip(
        ways, ("standard input", "COLLECTIVED_SECRET", str(path)), strict=True
    ):
        with pytest.raises(ConfigError) as error:
            resolve_values(WorkerSettings, {**PLACE, **flags}, environment, None, said)
        assert f"secret, from {origin}: it is shorter than 16 characters" in str(error.value)
        assert "openssl rand -hex 32" in str(error.value) and short not in str(error.value)
    assert resolve_values(WorkerSettings, PLACE, {}, None, SECRET[:16]).values["secret"] == SECRET[:16]
    assert resolve_values(WorkerSettings, PLACE, {}, None, "").values["secret"] == ""


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    home, system = tmp_path / "home", tmp_path / "system.toml"
    mine = home / ".config/collectived/collectived.toml"
    mine.parent.mkdir(parents=True)
    environment = {"HOME": str(home)}
    assert find_config_file(None, environment, system) is None
    system.touch()
    assert find_config_file(None, environment, system) == system
    mine.touch()
    assert find_config_file(None, environment, system) == mine
    assert find_config_file(None, {**environment, "COLLECTIVED_CONFIG": "/b"}, system) == Path("/b")
    assert find_config_file("/a", {"COLLECTIVED_CONFIG": "/b"}, system) == Path("/a")
    assert find_config_file("none", environment, system) is None


def test_a_file_that_is_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file"):
        load_config_file(tmp_path / "nowhere.toml")


def test_the_command_line_is_made_of_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line.build_parser("collectived")
    words = ["worker", "--task", "1", "--coordinator", "unix:/c", "--folder", "/f"]
    words += ["--patience", "3s", "--host-name", "h", "--no-insecure"]
    found = resolve_settings(
        WorkerSettings, command_line.collect_flags(WorkerSettings, parser.parse_args(words)), {}, None
    )
    assert (found.task, found.patience_seconds, found.host, found.insecure) == (1, 3.0, "h", False)
    words = ["coordinator", "--listen", "unix:/a", "--listen", ":0"]
    served = resolve_settings(
        CoordinatorSettings, command_line.collect_flags(CoordinatorSettings, parser.parse_args(words)), {}, None
    )
    assert served.listen == ("unix:/a", ":0")
    with pytest.raises(SystemExit):
        parser.parse_args(["worker", "--memory-limt", "3"])
    assert "did you mean '--memory-limit'?" in capsys.readouterr().err
