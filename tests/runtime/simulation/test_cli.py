"""`collectived simulate`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from collectived_runtime.plan.errors import PlanDeadlock
from collectived_runtime.simulation import cli
from collectived_runtime.simulation.arguments import parse_arguments
from collectived_runtime.simulation.proof import Proof

PAGE = (Path(__file__).parents[3] / "docs" / "guide" / "simulate.md").read_text()


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workers 0", "argument --workers: '0': expected a number of workers from 1 to 4096"),
        ("--workers 4097", "'4097': expected a number of workers from 1 to 4096"),
        ("--workers two", "'two': expected a number of workers"),
        ("--devices 9", "'9': expected a number of devices from 1 to 8"),
        ("--hosts 3,,1", "argument --hosts: '': expected a number of devices from 1 to 8"),
        ("--hosts 3,1 --workers 2", "expected either it or --workers and --devices"),
        ("--shards 0", "'0': expected a number of shards from 1 to 64"),
        ("--sizes 3B", "3 B in '3B': expected multiples of 4 bytes (float32) up to 16 GiB"),
        ("--sizes 0", "0 B in '0': expected multiples of 4 bytes"),
        ("--sizes 32GiB", "32 GiB in '32GiB': expected multiples of 4 bytes (float32) up to 16 GiB"),
        ("--sizes 64KB", "'64KB' is not a size: expected a number with B, KiB, MiB, GiB or TiB"),
        ("--sizes 1MiB:4B", "'1MiB:4B': expected sizes that grow"),
        ("--sizes 4B:8B:1", "'4B:8B:1': expected sizes that grow"),
        ("--sizes 4B:8B:x", "'4B:8B:x': expected FIRST:LAST or FIRST:LAST:FACTOR"),
        ("--sizes 4B:8B:2:2", "'4B:8B:2:2': expected FIRST:LAST or FIRST:LAST:FACTOR"),
        ("--algorithms rings", "'rings' is not an algorithm: expected all, or ring, tree, halving_doubling"),
        ("--algorithms ring,all", "'all' is not an algorithm"),
        ("--latency -1", "'-1': expected a number of at least 0"),
        ("--bandwidth 0", "'0': expected a number above 0"),
        ("--fold nan", "'nan': expected a number above 0"),
        ("--stream inf", "'inf': expected a number above 0"),
        ("--overhead some", "'some': expected a number of at least 0"),
        ("--plot picture.jpg", "'picture.jpg': expected a file name that ends with .png, .svg, .pdf"),
        ("--plot /no/such/a.png", "'/no/such/a.png': there is no folder '/no/such'"),
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_use_names_the_value_and_what_is_expected(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_arguments(arguments.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_are_a_list_of_sizes_and_ranges() -> None:
    question = parse_arguments(["--sizes", "1MiB,4B:64B,8:32:2"]).spec
    assert question.sizes == (4, 8, 16, 32, 64, 1 << 20)
    assert len(parse_arguments([]).spec.sizes) == 13


def test_hosts_are_workers_with_devices_or_named_one_by_one() -> None:
    assert parse_arguments([]).spec.hosts == (1,) * 8
    assert parse_arguments(["--workers", "2", "--devices", "3"]).spec.hosts == (3, 3)
    assert parse_arguments(["--hosts", "3,1,2"]).spec.hosts == (3, 1, 2)


def test_costs_are_given_in_the_units_of_the_field() -> None:
    words = "--latency 50 --bandwidth 100 --inside-latency 2 --inside-bandwidth 400 --overhead 1 --fold 20 --stream 8"
    model = parse_arguments(words.split()).spec.model
    assert (model.across.latency, model.across.bandwidth) == pytest.approx((50e-6, 12.5e9))
    assert (model.inside.latency, model.inside.bandwidth) == pytest.approx((2e-6, 50e9))
    assert (model.overhead, model.fold, model.stream) == pytest.approx((1e-6, 20e9, 1e9))


def test_the_tables_name_hosts_algorithms_bound_and_switches(capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, "--hosts", "3,1,2", "--sizes", "4B,1MiB", "--algorithms", "leader/ring,ring", "--check")
    assert "3 workers, 3, 1, 2 devices = 6 participants, 1 shard, float32" in out
    for words in ("leader/ring", "lower bound", "where AUTO switches", "any size", "every contribution exactly once"):
        assert words in out, words


@pytest.mark.parametrize("columns", (40, 80, 200))
def test_nothing_is_cut_off_where_the_terminal_has_room_for_one_algorithm(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = told(capsys, "--sizes", "1MiB", "--devices", "2")
    assert ("…" in out) == (columns == 40)


def test_json_has_the_keys_that_the_page_documents(capsys: pytest.CaptureFixture[str]) -> None:
    answer = json.loads(told(capsys, "--workers", "2", "--sizes", "4B,1MiB", "--check", "--json"))
    assert answer["hosts"] == [1, 1]
    assert [size["bytes"] for size in answer["sizes"]] == [4, 1 << 20]
    assert answer["sizes"][1]["algorithms"]["ring"]["rounds"] == 2
    assert answer["auto"][-1]["limit"] == -1
    assert {proof["algorithm"] for proof in answer["check"]} == set(answer["sizes"][0]["algorithms"])
    documented = set(re.findall(r"`(\w+)`", PAGE[PAGE.index("## `--json`") :]))
    algorithms = set(answer["sizes"][0]["algorithms"])
    assert keys(answer) - algorithms <= documented


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(key for inner in value.values() for key in keys(inner))}
    return {key for inner in value for key in keys(inner)} if isinstance(value, list) else set()


def test_without_a_check_json_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "check" not in json.loads(told(capsys, "--workers", "2", "--sizes", "4B", "--json"))


@pytest.mark.parametrize("suffix", (".png", ".svg", ".pdf"))
def test_a_picture_is_drawn(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / f"picture{suffix}"
    told(capsys, "--workers", "3", "--devices", "2", "--sizes", "4B:1MiB", "--plot", str(picture))
    assert picture.stat().st_size > 5000


def test_the_picture_names_every_algorithm_and_every_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.svg"
    out = told(capsys, "--sizes", "4B:1MiB", "--plot", str(picture))
    text = picture.read_text()
    for words in ("lower bound", "ring", "double_tree", "AUTO: one_shot", "AUTO: halving_doubling", "bus bandwidth"):
        assert f"<!-- {words} -->" in text, words
    assert "one_shot" in out


def test_one_participant_and_one_size_can_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "--workers", "1", "--sizes", "4B", "--plot", str(tmp_path / "one.png"))


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert cli.main(["--sizes", "4B", "--plot", str(tmp_path / "a.png")]) == 2
    assert "--plot needs matplotlib: pip install 'collectived[plot]'" in capsys.readouterr().err


def test_a_wrong_plan_is_status_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Proof:
        raise PlanDeadlock("round 3: 1 waits for 0")

    monkeypatch.setattr(cli, "prove", refuse)
    assert cli.main(["--sizes", "4B", "--check"]) == 1
    assert "--check: PlanDeadlock: round 3: 1 waits for 0" in capsys.readouterr().err


def test_a_check_of_too_much_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--workers", "4096", "--sizes", "4B", "--algorithms", "one_shot", "--check"]) == 2
    assert "choose fewer workers or other algorithms" in capsys.readouterr().err


def test_the_command_passes_everything_through() -> None:
    words = ["simulate", "--workers", "2", "--sizes", "4B", "--algorithms", "ring", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "collectived_launcher", *words], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["hosts"] == [1, 1]
