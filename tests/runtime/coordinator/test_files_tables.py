"""The file of stored tables: what is written is read, and what is damaged is named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from collectived_proto.config.daemons import CoordinatorSettings
from collectived_proto.types import Tier
from collectived_runtime.coordinator.core import tuning
from collectived_runtime.coordinator.files import default_table_path, read_tables, store_table
from collectived_runtime.coordinator.server import serve

ROWS = (Tier("one_shot", 1, 4096, 1 << 20), Tier("ring", 2, -1, 1 << 20))
ROW = {"algorithm": "ring", "shards": 1, "limit": -1, "bytes_per_pack": 0}


def test_what_is_stored_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "not" / "there" / "tables.json"
    assert read_tables(file) == {}
    store_table(file, "world 2,2", ROWS)
    store_table(file, "world 1,1", ROWS[1:])
    store_table(file, "world 2,2", ROWS[1:])
    assert read_tables(file) == {"world 1,1": ROWS[1:], "world 2,2": ROWS[1:]}
    assert [path.name for path in file.parent.iterdir()] == ["tables.json"]


@pytest.mark.parametrize(
    ("damaged", "what"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object of tables by name, got list"),
        ({"world 1": []}, "table 'world 1' must be a list of rows, got []"),
        ({"world 1": [7]}, "a row of table 'world 1' must have algorithm, shards, limit, bytes_per_pack, got 7"),
        ({"world 1": [ROW | {"shards": True}]}, "must have algorithm, shards"),
        ({"world 1": [ROW | {"algorithm": "magic"}]}, "none that this release can have made: {'algorithm': 'magic'"),
        ({"world 1": [ROW | {"shards": 0}]}, "none that this release can have made"),
        ({"world 1": [ROW | {"limit": 5}]}, "limits of table 'world 1' must increase and end with -1, got [5]"),
        ({"world 1": [ROW | {"limit": 5}, ROW | {"limit": 5}, ROW]}, "must increase and end with -1, got [5, 5, -1]"),
    ],
)
def test_a_damaged_file_is_named(damaged: Any, what: str, tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    file.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    with pytest.raises(ValueError) as caught:
        read_tables(file)
    assert str(caught.value).startswith(f"{file} is not a file of stored tables: ") and what in str(caught.value)
    assert str(caught.value).endswith("; remove it, and links will be measured again")


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="tables.json is not a file of stored tables"):
        read_tables(file)


def test_a_coordinator_does_not_start_with_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tables.json"
    file.write_text("yesterday")
    settings = CoordinatorSettings(job="job", listen=(f"unix:{tmp_path}/c",), secret="", tune=True, tables=file)
    with pytest.raises(SystemExit):
        asyncio.run(serve(settings))
    said = capsys.readouterr().err
    assert said.startswith(f"collectived coordinator: the stored tables cannot be used: {file} is not a file")
    assert said.count("\n") == 1


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    store_table(file, "world 1,1", ROWS)
    with pytest.raises(TypeError):
        store_table(file, "world 2,2", (Tier(object()),))  # type: ignore[arg-type]
    assert read_tables(file) == {"world 1,1": ROWS}
    assert [path.name for path in tmp_path.iterdir()] == ["tables.json"]


def test_the_file_lies_where_the_user_keeps_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_table_path() == Path("/state/collectived/tables.json")
    monkeypatch.setenv("HOME", "/home/u")
    for unset in ("", "relative/does/not/count"):
        monkeypatch.setenv("XDG_STATE_HOME", unset)
        assert default_table_path() == Path("/home/u/.local/state/collectived/tables.json")


def test_the_latest_thousand_tables_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MAX_STORED", 3)
    path = tmp_path / "tables.json"
    for name in ("a", "b", "c", "a", "d"):
        store_table(path, name, (Tier("ring"),))
    assert list(read_tables(path)) == ["c", "a", "d"]
