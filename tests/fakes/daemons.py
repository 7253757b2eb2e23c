"""A stand-in for the daemons, for what they would hardly do on demand: run as `daemons.py FAULT coordinator|worker …`.

It keeps the daemons' promises to the launcher: one `ready` line, an end in order when standard input ends. FAULT is
`none`, or one of: `refuse` (fails at once with a reason), `mute` (never ready), `deaf` (does not end with its standard
input), each with `:coordinator` or `:worker` for whom it befalls, and with `:again` if it does so only when it is
started for the second time or later.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def _was_here(kind: str, options: list[str]) -> bool:
    """Whether a daemon of this name was started before: each leaves a file in the job's folder."""
    place = options[options.index("--folder" if kind == "worker" else "--journal") + 1]
    folder = Path(place) if kind == "worker" else Path(place).parent
    mark = folder / f"{kind}{options[options.index('--task') + 1] if kind == 'worker' else ''}.mark"
    here = mark.exists()
    mark.touch()
    return here


def main() -> int:
    fault, *limits = sys.argv[1].split(":")
    kind, options = sys.argv[2], sys.argv[3:]
    if not {kind, *(["again"] if _was_here(kind, options) else [])}.issuperset(limits):
        fault = "none"
    secret = sys.stdin.readline()
    if len(secret) < 32 or "--attached" not in options:
        print(f"{kind}: no secret on standard input", file=sys.stderr)
        return 1
    if fault == "refuse":
        print(f"{kind}: address already in use", file=sys.stderr)
        return 1
    if fault != "mute":
        told = json.dumps({"address": f"unix:/nowhere/{kind}.sock", "pid": os.getpid()})
        sys.stdout.write(f"ready {told}\n")  # in one piece, for it may be killed at any moment
        sys.stdout.flush()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.stdin.read()
    if fault == "deaf":
        print(f"{kind}: did you say something?", file=sys.stderr, flush=True)
        time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(main())
