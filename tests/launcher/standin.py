"""A stand-in for the daemons, for what they would hardly do on demand: run as `standin.py FAULT coordinator|worker …`.

It keeps the daemons' promises to the launcher: one `ready` line, an end in order when standard input ends. FAULT is
`none`, or one of: `refuse` (fails at once with a reason), `mute` (never ready), `deaf` (does not end with its standard
input), each with `:coordinator` or `:worker` for whom it befalls.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def main() -> int:
    fault, _, whom = sys.argv[1].partition(":")
    kind, options = sys.argv[2], sys.argv[3:]
    if whom not in ("", kind):
        fault = "none"
    secret = sys.stdin.readline()
    if len(secret) < 32 or "--attached" not in options:
        print(f"{kind}: no secret on standard input", file=sys.stderr)
        return 1
    if fault == "refuse":
        print(f"{kind}: address already in use", file=sys.stderr)
        return 1
    if fault != "mute":
        print("ready", json.dumps({"address": f"unix:/nowhere/{kind}.sock", "pid": os.getpid()}), flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    sys.stdin.read()
    while fault == "deaf":
        time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
