"""`collectived launch --http`: the page of a job, who gets the link to it, and that it comes back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.docs.blocks import claimed
from tests.docs.own_root import run_as_root
from tests.e2e.launcher.conftest import PATIENCE, Place

from collectived_launcher.__main__ import run
from collectived_launcher.launch.daemons import WebPageLink

LAUNCH = (sys.executable, "-m", "collectived_launcher", "launch", "--http")
WAITS = (sys.executable, "-c", "print('here'); import time; time.sleep(600)")


def fetched(url: str, token: str = "") -> dict[str, Any]:
    """The status that is served at a page."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{url}status.json", headers=headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.mark.parametrize("address", ["0", "0.0.0.0:0"])
def test_the_page_of_a_job_is_found_by_its_file_and_comes_back_where_it_was(place: Place, address: str) -> None:
    launcher = place.run_in_background([*LAUNCH, address, "--", *WAITS])
    (said,) = place.lines_with(launcher, "page: ", 1)
    place.lines_with(launcher, "here", 1)
    found = re.fullmatch(r"page: http://[^/#]+:(\d+)/ \(the link with its token is in (.*)\)", said)
    assert found, "what is no terminal is not told the token"
    job = json.loads(Path(found[2]).read_text())
    assert os.stat(found[2]).st_mode & 0o077 == 0
    token = re.fullmatch(r"http://.*/#token=([0-9a-f]{32})", job["page"])
    assert token
    url = f"http://127.0.0.1:{found[1]}/"
    assert fetched(url, token[1])["coordinator"]["job"] == job["job"]
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        fetched(url)
    refused.value.close()

    former = place.daemon("coordinator")
    os.kill(former, signal.SIGKILL)
    place.successor("coordinator", former)
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(OSError):
            assert int(fetched(url, token[1])["coordinator"]["pid"]) == place.daemon("coordinator") != former
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)

    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130


def test_without_a_token_and_on_a_terminal_the_link_is_said(tmp_path: Path) -> None:
    assert (
        WebPageLink("http://127.0.0.1:80/").format_line(str(tmp_path), terminal=False) == "page: http://127.0.0.1:80/"
    )
    assert (
        WebPageLink("http://h:80/", "abc").format_line(str(tmp_path), terminal=True) == "page: http://h:80/#token=abc"
    )


@pytest.mark.timeout(120)
def test_a_terminal_is_shown_what_the_page_shows(tmp_path: Path) -> None:
    command, shown = (block.text.strip() for block in claimed(__file__))
    script = f"""cd "$OWN"; touch train.py; COLUMNS=120 script --quiet --return --command '{command}' /dev/null"""
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", run_as_root(script, tmp_path, hosts="own"))
    lines = [re.sub("[0-9a-f]{32}", "TOKEN", line) for line in re.split(r"[\r\n]+", said)]
    assert {re.sub("[0-9a-f]{32}", "TOKEN", line) for line in shown.splitlines()} <= set(lines)


def test_a_port_that_is_taken_is_said(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        launcher = place.run_in_background([*LAUNCH, str(taken.getsockname()[1]), "--", *WAITS])
        assert "--http: cannot serve at 127.0.0.1:" in place.error_with(launcher, "its last line")
        assert launcher.wait(PATIENCE) == 1


def test_what_is_no_address_is_refused_before_anything_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "--http", "localhost", "--", "true"]) == 2
    assert "expected PORT or HOST:PORT" in capsys.readouterr().err
