"""The tables of docs/reference/environment.md: `python -m tests.docs.configuration` (`make docs`) writes them.

Names are those that the code reads and sets. A variable without a row is an error, and so is a row that nothing reads.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.docs.contents import ROOT

from collectived.connection.failure_file import VARIABLE
from collectived.connection.launch_env import _JOBS as JOBS
from collectived.connection.launch_env import _MPI as MPI
from collectived.connection.launch_env import _SLURM as SLURM
from collectived_launcher.launch.job import Addresses, client_environment, make_local_job
from collectived_native.segment import SPIN_MICROSECONDS
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.settings import list_settings

PAGE = ROOT / "docs" / "reference" / "environment.md"
PACKAGES = ("proto", "client", "runtime", "launcher", "native")
NAME = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*"
CONNECT, JOIN = "[`connect`](connect.md)", "[`Session.join`](Session.join.md)"
CALLERS = "`collectived status`, `top`, `trace`, `drain`"
_PART = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_OF_LAUNCH = re.compile(r"SLURM_|PATH$")  # what `collectived launch` alone reads has a table by hand
_NOT_FOR_USERS = {"COLUMNS", "GRPC_ENABLE_FORK_SUPPORT", "GRPC_SSL_CIPHER_SUITES"}
_OF_BUILDS = {"CC", "COLLECTIVED_NATIVE", "COLLECTIVED_NATIVE_ARCHITECTURE"}


class Variable(NamedTuple):
    """A row: variables that are read together, what they mean, and who reads them."""

    names: tuple[str, ...]
    meaning: str
    readers: str


READ = [
    Variable(
        ("COLLECTIVED_WORKER",),
        "the worker to connect to: `unix:/path` or `host:port`; without it, your only running job, "
        "else the worker of the host, at `/run/collectived/worker.sock`",
        f"{CONNECT}, `collectived status`, `collectived trace`",
    ),
    Variable(
        ("COLLECTIVED_TLS_CA",),
        "a file with certificates of authorities, one of which must have signed the certificate of a "
        "worker over TCP; if set, TLS is used ([more](../operate/tls.md))",
        f"{CONNECT}, {CALLERS}; daemons",
    ),
    Variable(
        ("COLLECTIVED_TLS_CERT", "COLLECTIVED_TLS_KEY"),
        "files with the certificate that is shown to the worker, and its private key",
        f"{CONNECT}, {CALLERS}; daemons",
    ),
    Variable(
        ("COLLECTIVED_SECRET_FILE",),
        "a file with the job's secret, or with a client token: for a worker over TCP, or at a Unix socket "
        "that does not serve your user",
        f"{CONNECT}, {CALLERS}",
    ),
    Variable(
        ("COLLECTIVED_SECRET",),
        "the secret itself, if no file is named; a daemon started by hand reads it too",
        f"{CONNECT}, {CALLERS}, `collectived worker`, `collectived coordinator`",
    ),
    Variable(
        ("COLLECTIVED_VIEWING_TOKEN_FILE",),
        "a file with a viewing token, which only allows looking; used if neither of the two above is set",
        "`collectived status`, `top`, `trace`",
    ),
    Variable(
        ("COLLECTIVED_TRANSPORT",),
        "`grpc`: tensors travel inside gRPC messages, also on the worker's own host",
        CONNECT,
    ),
    Variable(
        ("COLLECTIVED_GROUP",), "name of the group; the default is `world` if a launcher has set rank and size", JOIN
    ),
    Variable(("WORLD_SIZE",), "number of ranks of the group", JOIN),
    Variable(
        ("RANK",), "rank of this process in a group of `WORLD_SIZE` ranks; without it the coordinator assigns one", JOIN
    ),
    Variable(MPI[0], "the same under Open MPI's `mpirun`, if `RANK` and `WORLD_SIZE` are not set", JOIN),
    Variable(MPI[1], "the same under MVAPICH's launcher", JOIN),
    Variable(MPI[2], "the same under MPICH's and Intel MPI's `mpiexec`, and `srun --mpi=pmi2`", JOIN),
    Variable(SLURM, "the same in a Slurm step: under `srun`. A batch script is no rank", JOIN),
    Variable(
        ("TF_CONFIG",),
        "the same if none of these is set: the chief is rank 0, and the workers follow; a process of any "
        "other type is refused",
        JOIN,
    ),
    Variable(
        ("COLLECTIVED_TIMEOUT",),
        "timeout of collectives, such as `30` (seconds) or `250ms`, if neither the call nor the group sets one",
        JOIN,
    ),
    Variable(
        ("COLLECTIVED_SPIN",),
        f"microseconds for which a waiting rank polls shared memory before it sleeps ({SPIN_MICROSECONDS}), "
        "0 for never; by default a rank never polls if its host has more ranks than usable cores",
        JOIN,
    ),
    Variable(
        ("COLLECTIVED_HOP",),
        "`0`: a rank never moves to another core when two ranks share one; a rank that is bound to some of "
        "the cores never moves",
        JOIN,
    ),
    Variable(
        ("COLLECTIVED_DIRECT",),
        "`0`: all values between this rank and the other ranks of its host pass the shared segment; else "
        "they read large ones in each other's processes, if the kernel permits that",
        JOIN,
    ),
    Variable(
        ("COLLECTIVED_JOB",),
        f"the job that scopes group names; {', '.join(f'else `{name}`' for name in JOBS[1:])}, else the user",
        CONNECT,
    ),
    Variable(
        ("COLLECTIVED_LABEL",),
        "name of this process in errors and status; else `POD_NAME`, else the Slurm step by `SLURM_STEP_ID`",
        CONNECT,
    ),
    Variable(
        ("COLLECTIVED_NCCL",),
        "the required binding of NCCL: `nccl4py`, `cupy` or `pynccl`",
        "`collectived worker`, `collectived doctor`",
    ),
    Variable(
        ("CUDA_VISIBLE_DEVICES",),
        "the GPUs that programs see, as in CUDA; a session is offered these GPUs of its worker",
        f"{CONNECT}, `collectived doctor`",
    ),
    Variable(
        ("COLLECTIVED_DOCTOR_TOKEN",),
        "the token that `doctor --serve` has printed, if it is not typed or piped in",
        "`collectived doctor --to`",
    ),
    Variable(
        ("SSH_CONNECTION",),
        "the address by which `doctor --hosts` reached a host; the other hosts are to use the same",
        "`collectived doctor`",
    ),
    Variable(("SHELL",), "the shell for which the script is, if none is named", "`collectived completion`"),
    Variable(
        ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"),
        "folders below which the script for the shell is written",
        "`collectived completion --install`",
    ),
    Variable(("TERM",), "`dumb`: this terminal cannot show `collectived top`", "`collectived top`"),
    Variable(
        ("XDG_RUNTIME_DIR",),
        "the folder below which running jobs are found; else `/tmp/collectived-<uid>`",
        f"{CONNECT}, the command",
    ),
    Variable(
        ("XDG_STATE_HOME",),
        "the folder below which a coordinator keeps the tables of `--tune`; else `~/.local/state`",
        "`collectived coordinator`",
    ),
    Variable(
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
        "the receiver of OpenTelemetry spans; if set, a worker sends them ([more](../operate/trace.md#opentelemetry))",
        "`collectived worker`",
    ),
    Variable(
        ("OTEL_SDK_DISABLED",),
        "`true`: a worker sends no spans, whatever the other variables are",
        "`collectived worker`",
    ),
]

SET = [
    (("COLLECTIVED_WORKER", "COLLECTIVED_JOB", "COLLECTIVED_GROUP"), "as above; the group is `world`"),
    (("COLLECTIVED_TIMEOUT",), "the value of `--timeout`; not set without it"),
    (("COLLECTIVED_COORDINATOR",), "the coordinator's address"),
    (("COLLECTIVED_RESTART",), "number of restarts of this client, from 0"),
    (
        ("COLLECTIVED_FAILURE_FILE",),
        "the file into which the library writes the exception that ended this client; the launcher's "
        "summary uses it to separate the root cause from consequences",
    ),
    (("RANK", "WORLD_SIZE"), "of this client, among all"),
    (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), "among the clients of its worker"),
    (("GROUP_RANK",), "the number of its worker"),
    (
        ("MASTER_ADDR", "MASTER_PORT"),
        "a free port of the first host, for programs with a rendezvous of their own, such as torch.distributed",
    ),
]


def list_read_variables() -> set[str]:
    """Every name that the code looks up in an environment, or makes of a setting."""
    texts = [path.read_text() for part in PACKAGES for path in (ROOT / part).rglob("*.py")]
    quoted = {name for text in texts for name in re.findall(rf'"({NAME})"', text)}
    looked_up = {name for text in texts for name in re.findall(r'environ(?:ment)?(?:\.get\(|\[)"([A-Z_]+)"', text)}
    connection = ROOT / "client" / "collectived" / "connection"
    for file in ("environment.py", "launch_env.py"):  # which look names up by functions of their own
        looked_up |= set(re.findall(r'"([A-Z0-9_]{4,})"', (connection / file).read_text()))
    launchers = {name for pair in (*MPI, SLURM) for name in pair}
    settings = {setting.variable for kind in DAEMONS.values() for setting in list_settings(kind)}
    found = {name for name in quoted if name.startswith(("COLLECTIVED_", "SLURM_", "XDG_", "OTEL_"))}
    return {*found, *looked_up, *launchers, *JOBS, *settings, "RANK", "WORLD_SIZE", "TF_CONFIG"}


def list_set_variables() -> set[str]:
    """What `collectived launch` gives a client."""
    job = make_local_job("j", 1, 1, ("true",), 1.0)
    return {*client_environment(job, Addresses("c", ("w",), 1), 0, 0), VARIABLE}


def fresh(text: str) -> str:
    """The page with its tables as the code is now.

    Raises:
        ValueError: a variable has no row, or a row has a variable that nothing reads or sets.
    """
    return _PART.sub(lambda found: f"{found[1]}{_make_read() if found[2] == 'read' else _make_set()}{found[3]}", text)


def _make_read() -> str:
    rows = [f"| {_quote(one.names)} | {one.meaning} | {one.readers} |\n" for one in READ]
    named = {name for one in READ for name in re.findall(rf"`({NAME})`", f"{_quote(one.names)} {one.meaning}")}
    settings = {setting.variable for kind in DAEMONS.values() for setting in list_settings(kind)}
    set_for_clients = {name for names, _ in SET[1:] for name in names}  # the first row is of what is read, too
    wanted = list_read_variables() - set_for_clients - _NOT_FOR_USERS - _OF_BUILDS - (settings - named)
    if missing := {name for name in wanted if not _OF_LAUNCH.match(name)} - named - {"COLLECTIVED_CONFIG"}:
        raise ValueError(f"give them a row in tests/docs/environment_page.py: {', '.join(sorted(missing))}")
    if unread := {name for one in READ for name in one.names} - list_read_variables():
        raise ValueError(f"nothing reads {', '.join(sorted(unread))}: take the row out")
    return "| variable | meaning | read by |\n|---|---|---|\n" + "".join(rows)


def _make_set() -> str:
    named = {name for names, _ in SET for name in names}
    if named != list_set_variables():
        raise ValueError(f"rows and variables differ by {', '.join(sorted(named ^ list_set_variables()))}")
    return "| variable | value |\n|---|---|\n" + "".join(f"| {_quote(names)} | {value} |\n" for names, value in SET)


def _quote(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
