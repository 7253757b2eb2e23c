"""Everything that a coordinator and a worker can be told, a sentence for each.

A new field here is also a flag, a variable, a key of the file and a row in
docs/reference/configuration.md (`make docs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from collectived_proto.config.rules import Rule
from collectived_proto.config.settings import REQUIRED, setting
from collectived_proto.config.value_types import (
    ADDRESS,
    ADDRESSES,
    BOOLEAN,
    HOST_PORT,
    NAMES,
    NUMBER,
    OPTIONAL_NUMBER,
    PATH,
    POSITIVE_SECONDS,
    RULES,
    SECONDS,
    SIZE,
    TEXT,
    one_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """What both kinds of daemons are told."""

    TABLE: ClassVar[str] = ""

    job: str = setting(TEXT, "default", "Name of the job, for status and for logs.")
    secret: str = setting(
        TEXT, "", "What callers over TCP must show; where nobody gives one they are all refused.", hidden=True
    )
    secret_file: Path | None = setting(PATH, None, "A file of one line with the secret, which only its owner may read.")
    viewing_token_file: Path | None = setting(
        PATH, None, "A file of one line with a token that is good for looking only: Status, Trace, metrics, the page."
    )
    tls_cert: Path | None = setting(
        PATH, None, "A file with this host's certificate (PEM): what is served over TCP is then served over TLS."
    )
    tls_key: Path | None = setting(PATH, None, "The file with the private key of it, which only its owner may read.")
    tls_ca: Path | None = setting(
        PATH,
        None,
        "A file with certificates of authorities (PEM): who calls over TCP must show a certificate of one, and then "
        "needs no secret; links between workers are encrypted too.",
    )
    client_tokens_file: Path | None = setting(
        PATH, None, "A file of lines NAME TOKEN [UNTIL]; each token lets its owner use workers, and rules may name it."
    )
    allow_users: tuple[str, ...] = setting(
        NAMES, (), "Users, beside the daemon's own and root, who are served at its Unix sockets."
    )
    allow_groups: tuple[str, ...] = setting(
        NAMES, (), "Groups whose members are served there; with neither of the two, the group of a 0750 folder."
    )
    insecure: bool = setting(BOOLEAN, False, "Admit callers over TCP without the secret.")
    log_level: str = setting(
        one_of("debug", "info", "warning", "error"), "warning", "From which level on logs are written."
    )
    log_format: str = setting(one_of("text", "json"), "text", "How logs are written; json is one object a line.")
    reflection: bool = setting(BOOLEAN, False, "Tell tools such as grpcurl what is served.")
    max_connections: int = setting(
        NUMBER,
        8192,
        "Connections at each address of gRPC; those beyond are closed at once. Half of all descriptors at most.",
    )
    max_message: int = setting(SIZE, 64 << 20, "The largest message over gRPC; one that is larger is refused.")
    max_login_failures: int = setting(
        NUMBER,
        20,
        "Wrong credentials from one address within a minute, after which more are refused late; 0: no limit.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings(DaemonSettings):
    """What a coordinator is told; each field is a key of the configuration."""

    TABLE: ClassVar[str] = "coordinator"

    listen: tuple[str, ...] = setting(
        ADDRESSES, REQUIRED, "Where to serve: unix:/path or host:port, one or several; port 0 is one that is free."
    )
    heartbeat_seconds: float = setting(
        POSITIVE_SECONDS,
        5.0,
        "How often workers are to be heard; one is lost after two of these.",
        also=("--heartbeat",),
    )
    stall_seconds: float = setting(
        POSITIVE_SECONDS, 1.0, "After how long of waiting a collective is reported as pending.", also=("--stall-after",)
    )
    journal: Path | None = setting(
        PATH,
        None,
        "A file of one line that keeps epochs rising over restarts; beside it FILE.workers keeps numbers of workers.",
    )
    tune: bool = setting(BOOLEAN, False, "Measure the links of a group when it forms, unless its table is stored.")
    tables: Path | None = setting(
        PATH, None, "File of stored tables; with `tune` by default $XDG_STATE_HOME/collectived/tables.json."
    )
    metrics: str = setting(
        HOST_PORT,
        "",
        "Serve Prometheus metrics there (no host: the loopback; port 0: one that is free); a flag alone: port 9450.",
        alone="9450",
    )
    http: str = setting(HOST_PORT, "", "Serve a web page there that shows what status shows (no host: the loopback).")
    max_groups: int = setting(NUMBER, 16_384, "Groups that form or run; joins of one more are refused. 0: no limit.")
    max_group_ranks: int = setting(NUMBER, 65_536, "Ranks that one group may have. 0: no limit.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(DaemonSettings):
    """What a worker is told; each field is a key of the configuration."""

    TABLE: ClassVar[str] = "worker"

    task: int | None = setting(
        OPTIONAL_NUMBER,
        None,
        "Number of this worker in its job, from 0; without one the coordinator gives it, the same to a host each time.",
    )
    coordinator: str = setting(ADDRESS, REQUIRED, "Address of the coordinator.", variable="COLLECTIVED_COORDINATOR")
    folder: Path = setting(
        PATH, REQUIRED, "Folder for its sockets; made with mode 0700 where it is missing. 0750 lets its group in too."
    )
    group_rules: tuple[Rule, ...] = setting(
        RULES,
        (),
        "Who may join groups, PATTERN = WHO …, such as 'night/* = user:ann group:ml token:ci'; the first that fits.",
    )
    device_rules: tuple[Rule, ...] = setting(
        RULES, (), "Who may join on devices, PATTERN = WHO …, such as 'GPU:0 = user:ann'; the first that fits."
    )
    listen: tuple[str, ...] = setting(
        ADDRESSES,
        (),
        "unix:/path instead of FOLDER/worker-TASK.sock, host:port beside it (without a host: the loopback), or both.",
    )
    link_listen: str = setting(
        ADDRESS, "127.0.0.1:0", "host:port for links of other workers; port 0 is one that is free."
    )
    host: str = setting(TEXT, "", "Name of this host for people; empty: its hostname.", also=("--host-name",))
    devices: str = setting(
        TEXT,
        "auto",
        "Devices to offer: `auto` is 8 CPUs and all GPUs, `CPU:n` no GPU, `GPU:0,1` these GPUs, by number or UUID.",
    )
    nccl: str = setting(
        one_of("auto", "nccl4py", "cupy", "pynccl"),
        "auto",
        "The binding of NCCL, where there are GPUs; `auto` is the first of them that can be loaded, or none.",
        variable="COLLECTIVED_NCCL",
    )
    memory_limit: int = setting(SIZE, 0, "Shared memory in all; 0: half of what this machine, or its cgroup, has.")
    patience_seconds: float = setting(
        SECONDS, 10.0, "How long a new worker looks for its coordinator.", also=("--patience",)
    )
    drain_seconds: float = setting(
        SECONDS, 10.0, "After SIGTERM, how long running collectives may take to finish; 0: they are cut at once."
    )
    metrics: str = setting(
        HOST_PORT,
        "",
        "Serve Prometheus metrics there (no host: the loopback; port 0: one that is free); a flag alone: port 9451.",
        alone="9451",
    )
    otel: bool = setting(BOOLEAN, False, "Send OpenTelemetry spans, one per collective.")
    max_sessions: int = setting(NUMBER, 1024, "Clients that are connected; one more is refused. 0: no limit.")
    max_session_ranks: int = setting(
        NUMBER, 256, "Ranks that one session holds or is joining; joins beyond are refused. 0: no limit."
    )
    max_session_memory: int = setting(
        SIZE, 0, "Shared memory that one session may ask for; 0: three quarters of memory_limit."
    )
    max_session_openings: int = setting(
        NUMBER, 64, "Allocations of its own that a session lends on each GPU; of others, values are copied. 0: none."
    )
    max_session_gpu_memory: int = setting(
        SIZE, 0, "Memory of each GPU that one session may ask for; 0: three quarters of the half that clients may have."
    )
    max_groups: int = setting(NUMBER, 512, "Groups with a rank here, each of which has a thread. 0: no limit.")
    max_handshakes: int = setting(
        NUMBER,
        1024,
        "Connections of clients to its Unix socket, and as many to its port for links, that have not said yet who they "
        "are: one more, and the oldest of them is closed. At least 1.",
    )


DAEMONS = {settings.TABLE: settings for settings in (CoordinatorSettings, WorkerSettings)}
