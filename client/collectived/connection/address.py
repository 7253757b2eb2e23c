"""Where the worker is: addresses, the search for one, a first knock, and the secret that is shown there."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from collectived.calls.local_failure import is_out_of_resources
from collectived.calls.timeout import Timeout
from collectived.errors import InvalidArgumentError, UnavailableError
from collectived_proto.addresses import parse_address, probe_address, unix_path
from collectived_proto.ipc import job_files
from collectived_proto.private_files import PrivateFileError, read_credential

if TYPE_CHECKING:
    from collectived_proto.tls.files import TlsMaterial

SECRET_FILE = "COLLECTIVED_SECRET_FILE"
SECRET = "COLLECTIVED_SECRET"
TLS = ("COLLECTIVED_TLS_CA", "COLLECTIVED_TLS_CERT", "COLLECTIVED_TLS_KEY")
_RETRY_DELAY = 0.05  # seconds between knocks at a worker that may be on its way back
_LAUNCH = "collectived launch --clients 2 -- python train.py"
_UP = "collectived up cluster.toml"  # before torchrun, which starts no workers


@dataclass(frozen=True, slots=True)
class WorkerAddress:
    """`unix:/path` or `host:port`, and where it was set."""

    text: str
    source: str

    def __post_init__(self) -> None:
        try:
            is_address = bool(self.path or parse_address(self.text)[0])
        except ValueError:
            is_address = False
        if not is_address:
            raise ValueError(
                f"{self.text!r} ({self.source}) is not a worker's address: expected unix:/path or host:port"
            )

    @property
    def path(self) -> str:
        """Path of the Unix socket; '' for TCP."""
        return unix_path(self.text)

    def probe(self, limit: Timeout) -> None:
        """Connects and hangs up, which takes no time where gRPC would try again and again.

        A killed worker leaves a socket file at which no process listens. It may be on its way back.

        Raises:
            UnavailableError: no process listens there. OSError: this process has no descriptor or memory for that.
        """
        while True:
            try:
                probe_address(self.text, limit.remaining)
                return
            except ConnectionRefusedError as error:
                if not self.path or not limit.deadline.remaining():
                    raise self._unreachable_error(error) from error
                time.sleep(_RETRY_DELAY)
            except (OSError, OverflowError) as error:
                if is_out_of_resources(error):
                    raise
                raise self._unreachable_error(error) from error

    def _unreachable_error(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"no worker answers at {self.text} ({self.source}): {error}; correct the address, or "
            f"start a job: {start_hint()}"
        )


def start_hint() -> str:
    """Return what to type where no worker is found."""
    return f"{_UP}, then torchrun again; or {_LAUNCH}" if "TORCHELASTIC_RUN_ID" in os.environ else _LAUNCH


def find_worker(worker: str | None) -> WorkerAddress:
    """The worker to connect to: the argument, COLLECTIVED_WORKER, the one job that is running, or the system's worker.

    Raises:
        TypeError, ValueError: not an address.
        InvalidArgumentError: several jobs are running.
        UnavailableError: none is.
    """
    if worker is not None and not isinstance(worker, str):
        raise TypeError(f"worker must be unix:/path or host:port, or None to look for one, got {worker!r}")
    if worker is not None:
        return WorkerAddress(worker, "given to connect()")
    if named := os.environ.get("COLLECTIVED_WORKER"):
        return WorkerAddress(named, "from COLLECTIVED_WORKER")
    found = [job for job in job_files.list_running_jobs() if job.workers]
    if not found:
        if system := job_files.find_system_worker():
            return WorkerAddress(system, "the system's worker")
        raise UnavailableError(
            f"you have no job running (looked at COLLECTIVED_WORKER, in {job_files.runtime_path()} and for "
            f"{job_files.SYSTEM_FOLDER / job_files.SYSTEM_SOCKET}); start one: {start_hint()}"
        )
    if len(found) > 1:
        lines = "".join(f"\n  COLLECTIVED_WORKER={job.workers[0]}  # job {job.job}, {job.command}" for job in found)
        raise InvalidArgumentError(f"you have {len(found)} jobs running; say which one you mean:{lines}")
    return WorkerAddress(found[0].workers[0], f"of the running job {found[0].job}")


def load_tls(worker: WorkerAddress) -> TlsMaterial | None:
    """Load the TLS files that the environment names for an address; None: TLS is not used.

    Raises:
        ValueError: a file cannot be used.
    """
    if worker.path or not any(os.environ.get(name) for name in TLS):
        return None
    from collectived_proto.tls.files import TlsFiles, load_material  # late, for it imports ssl

    return load_material(TlsFiles.from_environment(os.environ))


def read_secret(worker: WorkerAddress) -> str:
    """The job's secret, or a client token; '' where nothing says it.

    At a Unix socket it is shown too: clients need it where the worker does not serve their uid, as from another
    container. Other clients do not need it, so that a file which cannot be read is no error there.

    Raises:
        InvalidArgumentError: the file that should hold it cannot be read or is empty, or every user may read it.
    """
    name = os.environ.get(SECRET_FILE)
    if not name:
        return os.environ.get(SECRET, "").strip()
    try:
        return read_credential(Path(name), needed=not worker.path)
    except PrivateFileError as error:
        raise InvalidArgumentError(f"{SECRET_FILE}={name!r} {error}") from None
