"""Which Python, which libraries, and whether a daemon could load them."""

from __future__ import annotations

import importlib.metadata as metadata
import platform
import subprocess
import sys

from collectived_launcher.doctor.facts import Library, Software
from collectived_launcher.doctor.versions import parse_requirement

PACKAGE = "collectived"
_DAEMON_IMPORTS = "grpc, grpc_health, grpc_status, google.protobuf, ml_dtypes, numkong, numpy"
_IMPORT_PROGRAM = f"import {_DAEMON_IMPORTS}, prometheus_client, collectived_proto.v1.worker_pb2_grpc"


def probe_software(loads_within: float) -> Software:
    """
    Args:
        loads_within: seconds for a Python to load what a daemon loads.
    """
    cannot_load, slow = _try_imports(loads_within)
    about = metadata.metadata(PACKAGE)
    wanted = [found for text in metadata.requires(PACKAGE) or () if (found := parse_requirement(text))]
    return Software(
        release=metadata.version(PACKAGE),
        python=platform.python_version(),
        wanted_python=str(about["Requires-Python"] or ""),
        libraries=tuple(Library(name, _installed_version(name), versions) for name, versions in wanted),
        extras=tuple(about.get_all("Provides-Extra") or ()),
        cannot_load=cannot_load,
        slow_to_load=slow,
    )


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _try_imports(within: float) -> tuple[str, float]:
    """A process of its own, started as daemons are: what cannot be loaded may take its process along."""
    line = [sys.executable, "-P", "-c", _IMPORT_PROGRAM]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=within)
    except subprocess.TimeoutExpired:
        return "", within
    if not done.returncode:
        return "", 0.0
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1], 0.0
