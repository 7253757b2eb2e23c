"""`launch --metrics` on real daemons: where each is scraped, also when it was started again, and by what token."""

from __future__ import annotations

import os
import re
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.docs.blocks import claimed
from tests.docs.stage import plain
from tests.e2e.launcher.conftest import PATIENCE, Place

ENDS = "{signal.SIGINT, signal.SIGTERM}"
WAIT = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {ENDS}); print('up'); signal.sigwait({ENDS})"


def scraped(url: str, token: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=PATIENCE) as page:
        text: str = page.read().decode()
    return text


def test_every_daemon_says_where_its_metrics_are_and_says_it_again_when_it_is_back(place: Place) -> None:
    command = [sys.executable, "-m", "collectived_launcher", "launch", "--metrics", "--", sys.executable, "-c", WAIT]
    launcher = place.run_in_background(command)

    (block,) = claimed(__file__)
    shown = {plain(line) for line in block.text.splitlines()}

    def said(pattern: str) -> str:
        line = place.error_with(launcher, pattern)
        assert plain(line) in shown, line
        found = re.search(pattern, line)
        assert found
        return found[1]

    urls = {daemon: said(rf"metrics of {daemon}: (http://\S+)$") for daemon in ("coordinator", "worker 0")}
    file = Path(said(r"metrics need the token in (\S+)"))
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip()
    for daemon, url in urls.items():
        kind = daemon.partition(" ")[0]
        assert f'collectived_build_info{{component="{kind}"' in scraped(url, token)
        for other in ("", "no-token-of-this-job"):
            with pytest.raises(urllib.error.HTTPError, match="401") as refused:
                scraped(url, other)
            refused.value.close()
    place.lines_with(launcher, "up", 1)
    os.kill(place.daemon("worker 0"), signal.SIGKILL)
    assert scraped(said(r"metrics of worker 0: (http://\S+)$"), token)
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(PATIENCE) == 130
    assert not file.exists()
