"""`make test`: all tests, and what failed among them once more alone.

Many tests start daemons and hold them to promises in milliseconds. A promise holds on a machine that gives its
processes processor time, which several tests side by side on two cores do not always get. So a test that failed in
company is asked once more with nobody beside it, and that answer counts. It is said aloud which tests needed it: one
that needs it often has a defect, or shows one. More than FEW_ENOUGH of them fail the run, though they pass alone. More
than FEW failures are no matter of company, and nothing is asked again.

Most of the time goes into starting processes, many hundreds of them. So Python may keep what it has compiled, whatever
the shell says of PYTHONDONTWRITEBYTECODE: else each of them compiles the whole project once more. And NumPy's OpenBLAS
starts no threads, which spin for tens of milliseconds, in every process, before they find that nobody multiplies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FEW = 4
FEW_ENOUGH = 2  # of those that passed alone: more are a defect of the tests, and fail the run
FAILED = 1  # pytest's exit status where tests ran and some failed; all others are no matter of company

_ROOT = Path(__file__).resolve().parent.parent
_FAILED_LAST = _ROOT / ".pytest_cache" / "v" / "cache" / "lastfailed"


def again(status: int, failed: Sequence[str]) -> Sequence[str]:
    """Which tests deserve to be asked again alone, after pytest ended with this status."""
    return failed if status == FAILED and 0 < len(failed) <= FEW else ()


def verdict(alone: Sequence[str], status: int) -> str:
    """What is said last, after those tests were run alone and pytest ended with this status."""
    names = "".join(f"\n  {name}" for name in alone)
    if status == 0:
        judged = (
            "look at them if they come again" if len(alone) <= FEW_ENOUGH else f"more than {FEW_ENOUGH} fail the run"
        )
        return f"passed alone, after failing beside other tests ({judged}):{names}"
    return f"failed beside other tests, and at least one of them alone too:{names}"


def surroundings(shell: Mapping[str, str]) -> Mapping[str, str]:
    """The environment of the tests, of that of the shell."""
    kept = {name: value for name, value in shell.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {"OPENBLAS_NUM_THREADS": "1", **kept}


def main(options: Sequence[str]) -> int:
    status = _pytest("--cache-clear", *options)
    alone = again(status, _failed())
    if alone:
        status = _pytest("-n", "0", *alone)
        print(verdict(alone, status), flush=True)
    print(f"tests that were asked again alone: {len(alone)} (more than {FEW} are not)", flush=True)
    return final_status(alone, status)


def final_status(alone: Sequence[str], status: int) -> int:
    """The exit status of the run, after those tests were run alone and pytest ended with this status."""
    return status or (FAILED if len(alone) > FEW_ENOUGH else 0)


def _pytest(*options: str) -> int:
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=_ROOT, env=surroundings(os.environ), check=False).returncode


def _failed() -> Sequence[str]:
    return sorted(json.loads(_FAILED_LAST.read_text())) if _FAILED_LAST.exists() else ()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
