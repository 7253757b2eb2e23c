"""All configuration keys of a coordinator and a worker, with a sentence for each.

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
    """The configuration that both kinds of daemons have."""

    TABLE: ClassVar[str] = ""

    job: str = setting(TEXT, "default", "Name of the job, shown in status and logs.")
    secret: str = setting(
        TEXT, "", "The secret that callers over TCP must show; without one, all of them are refused.", hidden=True
    )
    secret_file: Path | None = setting(PATH, None, "A file of one line with the secret; only its owner may read it.")
    viewing_token_file: Path | None = setting(
        PATH, None, "A file of one line with a token that only allows looking: Status, Trace, metrics, the page."
    )
    tls_cert: Path | None = setting(
        PATH, None, "A file with this host's certificate (PEM); with it, TCP addresses are served over TLS."
    )
    tls_key: Path | None = setting(
        PATH, None, "The file with the certificate's private key; only its owner may read it."
    )
    tls_ca: Path | None = setting(
        PATH,
        None,
        "A file with certificates of authorities (PEM); callers over TCP must show a certificate of one of them and "
        "need no secret; links between workers are encrypted too.",
    )
    client_tokens_file: Path | None = setting(
        PATH, None, "A file of lines NAME TOKEN [UNTIL]; each token allows using workers, and rules may name it."
    )
    allow_users: tuple[str, ...] = setting(
        NAMES, (), "Users who are served at its Unix sockets, besides the daemon's own user and root."
    )
    allow_groups: tuple[str, ...] = setting(
        NAMES,
        (),
        "Groups whose members are served there; without allow_users and allow_groups, the group of a 0750 folder.",
    )
    insecure: bool = setting(BOOLEAN, False, "Admit callers over TCP without the secret.")
    log_level: str = setting(
        one_of("debug", "info", "warning", "error"), "warning", "The lowest level of log lines that are written."
    )
    log_format: str = setting(one_of("text", "json"), "text", "Format of logs; json is one object per line.")
    reflection: bool = setting(BOOLEAN, False, "Serve gRPC reflection, for tools such as grpcurl.")
    max_connections: int = setting(
        NUMBER,
        8192,
        "Connections at each gRPC address; further ones are closed at once. At most half of a worker's descriptors.",
    )
    max_message: int = setting(SIZE, 64 << 20, "The largest message over gRPC; a larger one is refused.")
    max_login_failures: int = setting(
        NUMBER,
        20,
        "Wrong credentials from one address within a minute; further ones are refused late. 0: no limit.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings(DaemonSettings):
    """The configuration of a coordinator. Each field is a key of the configuration."""

    TABLE: ClassVar[str] = "coordinator"

    listen: tuple[str, ...] = setting(
        ADDRESSES, REQUIRED, "Addresses to serve: unix:/path or host:port, one or several; port 0 is a free one."
    )
    heartbeat_seconds: float = setting(
        POSITIVE_SECONDS,
        5.0,
        "Interval of heartbeats; a worker is lost after two missed ones.",
        also=("--heartbeat",),
    )
    stall_seconds: float = setting(
        POSITIVE_SECONDS,
        1.0,
        "Time of waiting after which a collective is reported as pending.",
        also=("--stall-after",),
    )
    journal: Path | None = setting(
        PATH,
        None,
        "A file of one line that keeps epochs rising over restarts; FILE.workers beside it keeps numbers of workers.",
    )
    tune: bool = setting(BOOLEAN, False, "Measure the links of a group when it forms, unless its table is stored.")
    tables: Path | None = setting(
        PATH, None, "File of stored tables; the default with `tune` is $XDG_STATE_HOME/collectived/tables.json."
    )
    metrics: str = setting(
        HOST_PORT,
        "",
        "Serve Prometheus metrics there (no host: the loopback; port 0: a free one); the flag alone: port 9450.",
        alone="9450",
    )
    http: str = setting(HOST_PORT, "", "Serve a web page there that shows the status (no host: the loopback).")
    max_groups: int = setting(
        NUMBER, 16_384, "Groups that form or run; joins of further groups are refused. 0: no limit."
    )
    max_group_ranks: int = setting(NUMBER, 65_536, "Ranks that one group may have. 0: no limit.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(DaemonSettings):
    """The configuration of a worker. Each field is a key of the configuration."""

    TABLE: ClassVar[str] = "worker"

    task: int | None = setting(
        OPTIONAL_NUMBER,
        None,
        "Number of this worker in its job, from 0; by default the coordinator assigns it, always the same to a host.",
    )
    coordinator: str = setting(ADDRESS, REQUIRED, "Address of the coordinator.", variable="COLLECTIVED_COORDINATOR")
    folder: Path = setting(
        PATH, REQUIRED, "Folder for its sockets; created with mode 0700 if it is missing. 0750 admits its group too."
    )
    group_rules: tuple[Rule, ...] = setting(
        RULES,
        (),
        "Permission to join groups: PATTERN = WHO …, such as 'night/* = user:ann token:ci'; the first match decides.",
    )
    device_rules: tuple[Rule, ...] = setting(
        RULES,
        (),
        "Permission to join on devices: PATTERN = WHO …, such as 'GPU:0 = user:ann'; the first match decides.",
    )
    listen: tuple[str, ...] = setting(
        ADDRESSES,
        (),
        "unix:/path instead of FOLDER/worker-TASK.sock, host:port beside it (without a host: the loopback), or both.",
    )
    link_listen: str = setting(ADDRESS, "127.0.0.1:0", "host:port for links from other workers; port 0 is a free one.")
    host: str = setting(TEXT, "", "Name of this host in status and errors; empty: its hostname.", also=("--host-name",))
    devices: str = setting(
        TEXT,
        "auto",
        "Devices to offer: `auto` is 8 CPUs and all GPUs, `CPU:n` no GPU, `GPU:0,1` these GPUs, by number or UUID.",
    )
    nccl: str = setting(
        one_of("auto", "nccl4py", "cupy", "pynccl"),
        "auto",
        "The binding of NCCL for GPUs; `auto` is the first one that can be loaded, or none.",
        variable="COLLECTIVED_NCCL",
    )
    memory_limit: int = setting(
        SIZE, 0, "Limit of shared memory; 0: half of the memory of this machine, or of its cgroup."
    )
    patience_seconds: float = setting(
        SECONDS, 10.0, "How long a new worker tries to reach its coordinator.", also=("--patience",)
    )
    drain_seconds: float = setting(
        SECONDS, 10.0, "Time for running collectives to finish after SIGTERM; 0: they are cut at once."
    )
    metrics: str = setting(
        HOST_PORT,
        "",
        "Serve Prometheus metrics there (no host: the loopback; port 0: a free one); the flag alone: port 9451.",
        alone="9451",
    )
    otel: bool = setting(BOOLEAN, False, "Send OpenTelemetry spans, one per collective.")
    max_sessions: int = setting(NUMBER, 1024, "Connected clients; further ones are refused. 0: no limit.")
    max_session_ranks: int = setting(
        NUMBER, 256, "Ranks that one session holds or is joining; further joins are refused. 0: no limit."
    )
    max_session_memory: int = setting(
        SIZE, 0, "Shared memory that one session may ask for; 0: three quarters of memory_limit."
    )
    max_session_openings: int = setting(
        NUMBER, 64, "Allocations of its own that a session lends on each GPU; values in others are copied. 0: none."
    )
    max_session_gpu_memory: int = setting(
        SIZE, 0, "Memory of each GPU that one session may ask for; 0: three quarters of the half that clients may have."
    )
    max_groups: int = setting(NUMBER, 512, "Groups with a rank here; each has a thread. 0: no limit.")
    max_handshakes: int = setting(
        NUMBER,
        1024,
        "Connections that have not completed the handshake, at its Unix socket for clients and at its port for links "
        "each; a further one closes the oldest. At least 1.",
    )


DAEMONS = {settings.TABLE: settings for settings in (CoordinatorSettings, WorkerSettings)}
