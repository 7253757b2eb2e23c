"""`launch --metrics` on real daemons: where each of them is scraped, also when it has been started again."""

from __future__ import annotations

import os
import re
import signal
import sys
import urllib.request
from typing import Any

ENDS = "{signal.SIGINT, signal.SIGTERM}"
WAIT = f"import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {ENDS}); print('up'); signal.sigwait({ENDS})"


def test_every_daemon_says_where_its_metrics_are_and_says_it_again_when_it_is_back(place: Any) -> None:
    command = [sys.executable, "-m", "collectived_launcher", "launch", "--metrics", "--", sys.executable, "-c", WAIT]
    launcher = place.run_in_background(command)
    for daemon in ("coordinator", "worker 0"):
        url = re.search(r"http://\S+$", place.error_with(launcher, rf"metrics of {daemon}: "))
        assert url
        with urllib.request.urlopen(url[0]) as page:
            kind = daemon.partition(" ")[0]
            assert f'collectived_build_info{{component="{kind}"' in page.read().decode()
    place.lines_with(launcher, "up", 1)
    os.kill(place.daemon("worker 0"), signal.SIGKILL)
    again = re.search(r"http://\S+$", place.error_with(launcher, "metrics of worker 0: "))
    assert again
    with urllib.request.urlopen(again[0]) as page:
        assert page.status == 200
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) == 130
