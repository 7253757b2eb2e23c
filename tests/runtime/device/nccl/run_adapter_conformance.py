"""Tries every fact on one binding, in a process of its own: `python -m
tests.runtime.device.nccl.run_adapter_conformance NAME LIBRARY`.

Of its own, for a process that has loaded the libnccl of tests finds no other one any more. Prints a JSON object: of
each fact what went wrong, or nothing; or why the binding could not be loaded.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

from tests.fakes.libnccl import Fake, Setting
from tests.runtime.device.nccl.adapter_conformance import FACTS

from collectived_proto.errors import FailedPreconditionError
from collectived_runtime.device.nccl.binding import load_binding


def main(name: str, library: str) -> dict[str, str]:
    fake = Fake(Path(library))
    os.environ["NUMBA_NCCLLIB"] = str(Path(library).parent)
    try:
        nccl = load_binding(name)
    except FailedPreconditionError as error:
        return {"missing": str(error)}
    found = {}
    for title, fact in FACTS.items():
        for setting in Setting:
            fake.set(setting, 0)
        try:
            fact(nccl, fake)
            found[title] = ""
        except Exception:
            found[title] = traceback.format_exc()
    return found


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])), flush=True)
    os._exit(0)  # threads of a fact that failed may hang forever
