"""The tables of docs/operate/limits.md: `python -m tests.docs.configuration` (`make docs`) writes them.

Numbers and keys are those of the code. Shares, such as half of a machine's memory, are words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from collectived.values import new_arrays
from collectived_native._core import MAX_LETTERS
from collectived_proto.config.daemons import DAEMONS
from collectived_proto.config.settings import list_settings
from collectived_proto.ipc import messages
from collectived_runtime import process
from collectived_runtime.coordinator.core import registry, tuning
from collectived_runtime.engine.base.arenas import UNEXPECTED_MEMORY_DIVISOR
from collectived_runtime.engine.clients import doorbells
from collectived_runtime.engine.p2p import rank_links
from collectived_runtime.grpc_server import authentication, throttling
from collectived_runtime.http.server import HttpLimits
from collectived_runtime.limits.rate_limit import Rate
from collectived_runtime.transport import connections, listener, pool
from collectived_runtime.worker import arenas, prepared, service, sessions, stacks
from collectived_runtime.worker.remote_ranks import submit

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "limits.md"
_PART = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_KEYS = {key.path: key for settings in DAEMONS.values() for key in list_settings(settings)}
_SHARES = {4: "a quarter", 16: "a sixteenth"}
_SHUTS = "the connection is closed"
_REFUSED = "the request is refused"
_JOIN = "the join is refused"
_INVALID = "the call is refused (`INVALID_ARGUMENT`)"


class LimitRow(NamedTuple):
    """One limit; `default` and `key` are cells of the table."""

    what: str
    default: str
    key: str
    beyond: str


def by_key(what: str, path: str, beyond: str) -> LimitRow:
    """A limit that a key sets, with the default of that key."""
    key = _KEYS[path]
    default = _size(key.default) if key.value_type.name == "size" else f"{key.default:,}"
    return LimitRow(what, default, f"`{path}`", beyond)


def limits() -> list[LimitRow]:
    """All limits, those of a worker's clients first."""
    return [*_of_sessions(), *_of_calls(), *_of_connections()]


def _of_sessions() -> list[LimitRow]:
    share = _SHARES[sessions._RETAINED_DIVISOR]
    letters = (
        f"{_SHARES[UNEXPECTED_MEMORY_DIVISOR]} of the worker's shared memory; if all ranks are on one worker, each "
        f"sender has its share of that, and {MAX_LETTERS:,} messages; of those that ranks of several workers send "
        "themselves, each receiver keeps its share in its own process"
    )
    return [
        by_key("sessions of a worker", "worker.max_sessions", "the session is refused"),
        by_key("ranks that one session holds or is joining", "worker.max_session_ranks", _JOIN),
        by_key("groups with a rank on a worker, a thread each", "worker.max_groups", _JOIN),
        LimitRow(
            "threads and descriptors that the system grants a worker, if a group needs one more",
            "",
            "",
            f"{_JOIN}, and the others of the group lose that rank at once",
        ),
        by_key("groups of a coordinator, forming or running", "coordinator.max_groups", _JOIN),
        by_key("ranks of one group", "coordinator.max_group_ranks", _JOIN),
        LimitRow(
            "shared memory of a worker",
            "half of the memory of the machine, or of its cgroup",
            "`worker.memory_limit`",
            _REFUSED,
        ),
        LimitRow(
            "shared memory that one session asks for, writes into its groups' segments, and keeps of ended groups; "
            "with the memory that its user's processes keep of ended sessions",
            "three quarters of that",
            "`worker.max_session_memory`",
            f"{_REFUSED}, and so is a join that needs more; a session that writes more is ended",
        ),
        LimitRow(
            "ended groups whose memory is kept by one session and by its user's ended sessions",
            f"{share} of the worker's descriptors",
            "`LimitNOFILE`",
            "the next join is refused",
        ),
        LimitRow("memory of a GPU for all clients", "half of it", "", _REFUSED),
        LimitRow(
            "memory of each GPU that one session asks for, or keeps after giving it back; with the memory that its "
            "user's processes keep of ended sessions",
            "three quarters of that",
            "`worker.max_session_gpu_memory`",
            _REFUSED,
        ),
        LimitRow(
            "memory of large arrays that a client process keeps for later results, "
            f"{_size(new_arrays.MIN_KEPT_BYTES)} or more each",
            _size(new_arrays.MAX_FREE_BYTES),
            "",
            "the rest goes back to the system",
        ),
        LimitRow("pieces of shared memory of one session, GPU memory included", f"{arenas.MAX_ARENAS:,}", "", _REFUSED),
        by_key(
            "allocations of its own that one session lends on each [GPU](../guide/gpus.md); 0: none",
            "worker.max_session_openings",
            "values are copied; the client closes the allocations used least",
        ),
        LimitRow(
            "collectives of a rank in flight, in a group of several workers or over gRPC alone",
            f"{messages.MAX_OUTSTANDING:,}",
            "",
            "the library waits; a gRPC client without it is refused",
        ),
        LimitRow(
            "sends and receives of a rank in flight",
            f"{messages.MAX_P2P_OUTSTANDING:,}",
            "",
            "the same; the library says so once after 10 s. A receive that finds no room within its timeout ends alone",
        ),
        LimitRow(
            "bytes of messages that no rank has received",
            letters,
            "",
            "the group fails (`RESOURCE_EXHAUSTED`), naming the sender; on one worker, after a second without a "
            "receive",
        ),
        LimitRow(
            "connections over which a rank sends messages to ranks itself, in a group of several workers",
            f"{rank_links.MAX_LINKS}",
            "",
            "messages to other ranks go by the workers",
        ),
    ]


def _of_calls() -> list[LimitRow]:
    described = f"{prepared.MAX_PREPARED:,}, of {_size(prepared.MAX_DESCRIPTION_BYTES)} together"
    return [
        LimitRow("collectives that a rank has described", described, "", "the oldest are forgotten"),
        LimitRow("the name of a group or a job", f"{prepared.MAX_GROUP_NAME_CHARS} characters", "", _INVALID),
        LimitRow("leaves of one value", f"{prepared.MAX_LEAVES:,}", "", _INVALID),
        by_key("a message over gRPC", "max_message", "the call fails, before the message is read"),
        LimitRow("a chunk of a value over gRPC", _size(submit.CHUNK_BYTES), "", _INVALID),
        LimitRow("metadata of a call", _size(process.MAX_METADATA_BYTES), "", "the call fails"),
        LimitRow("calls of one connection at a time", f"{process.MAX_STREAMS:,}", "", "the call waits"),
    ]


def _of_connections() -> list[LimitRow]:
    page = HttpLimits()
    gone = f"{registry.MAX_FINISHED_GENERATIONS} generations, {registry.MAX_FAILURES} failures"
    assert connections.HANDSHAKE_SECONDS == process.HANDSHAKE_SECONDS
    return [
        LimitRow(
            "connections at each address of gRPC",
            f"{_KEYS['max_connections'].default:,}; at a worker also half of its descriptors, at a coordinator all "
            "but the [reserve](#descriptors)",
            "`max_connections`",
            f"{_SHUTS} at once",
        ),
        LimitRow(
            "connections at Unix sockets of gRPC, all together",
            "a ninth of all descriptors; an eighth of these for one user, except the daemon's own and root",
            "",
            f"{_SHUTS} at once",
        ),
        by_key(
            "connections that have not completed the handshake: at the Unix socket for clients, and at the port for "
            "links, each",
            "worker.max_handshakes",
            "the connection is accepted, and the oldest of them is closed",
        ),
        LimitRow("time for the handshake: Unix socket, links, HTTP/2", f"{process.HANDSHAKE_SECONDS:g} s", "", _SHUTS),
        LimitRow(
            "ended groups that the coordinator remembers",
            gone,
            "",
            "the oldest are forgotten; with the last generation of a name its key",
        ),
        LimitRow(
            "tables of measured links (`--tune`)",
            f"{tuning.MAX_STORED:,} names",
            "",
            "the oldest measurements are forgotten, also in the file",
        ),
        LimitRow(
            "connections of links that are kept for the next generation; not those that may be [lent to ranks]"
            "(../internals/architecture.md#large-values-of-the-only-rank-of-a-worker)",
            f"{pool.MAX_POOLED}, for {pool.MAX_IDLE_SECONDS:g} s",
            "",
            "the oldest is closed; the next link is dialled",
        ),
        LimitRow(
            "a connection of gRPC without calls",
            f"{process.IDLE_SECONDS / 60:g} min",
            "",
            f"{_SHUTS}; the next call makes another",
        ),
        LimitRow(
            "connections at the page and at metrics",
            f"{page.connections} each; {page.request_seconds:g} s to ask, {page.send_seconds:g} s to take the answer",
            "",
            "the connection is accepted, and the oldest one without a request is closed. If all have sent a request, "
            "the newest is closed",
        ),
        by_key(
            "wrong credentials from one address, within a minute",
            "max_login_failures",
            "further wrong ones are answered late for the rest of the minute",
        ),
        LimitRow(
            "a process's report of its threads, when other ranks wait for it",
            f"{messages.MAX_STACK:,} characters, once in {stacks.PAUSE_SECONDS:g} s; of four ranks of a worker at a "
            "time, and of four in an error",
            "",
            "the report is cut; after an unrequested report the process is asked no more",
        ),
        LimitRow(
            "messages that a client leaves unread",
            f"{doorbells.MAX_UNREAD:,}, or {_size(doorbells.MAX_UNREAD_BYTES)}",
            "",
            "the client is disconnected: its rank is lost",
        ),
    ]


def floods() -> list[tuple[str, str, Rate]]:
    """Kinds of calls, what they are counted by, and their rate."""
    rates = {method.rpartition("/")[2]: rate for method, rate in throttling.RATES.items()}
    caller = "caller's address; at a Unix socket, its user"
    assert rates["Trace"] == rates["Drain"] and rates["Check"] == rates["Watch"]
    assert set(rates) == {"Status", "Trace", "Drain", "Check", "Watch"}
    return [
        ("`OpenSession`", caller, throttling.OPEN_SESSION_RATE),
        ("`Status`", caller, rates["Status"]),
        ("`Trace` and `Drain`, each", caller, rates["Trace"]),
        ("the health service", caller, rates["Check"]),
        ("calls without the right credential", caller, authentication._AUTH_FAILURE_RATE),
        ("calls of unknown methods", caller, throttling.REFUSAL_RATE),
        ("descriptions of collectives", "session", service.PREPARE_RATE),
        ("joins", "session", service.JOIN_RATE),
        (
            "messages at a local socket that start nothing new: a repeated submission, a release by itself, a ping",
            "rank",
            doorbells.IDLE_MESSAGE_RATE,
        ),
        (
            "new connections at the Unix socket for clients, and at the port for links",
            "socket",
            listener.ACCEPT_RATE,
        ),
    ]


def fresh(text: str) -> str:
    """The page with its tables as the code is now."""
    return _PART.sub(lambda found: f"{found[1]}{_TABLES[found[2]]()}{found[3]}", text)


def _limits_table() -> str:
    lines = ["| limit | default | key | beyond it |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |".replace("|  ", "| ").replace("|  ", "| ") for row in limits()]
    return "".join(f"{line}\n" for line in lines)


def _floods_table() -> str:
    lines = ["| calls | counted per | a second | at once |", "|---|---|---|---|"]
    lines += [f"| {what} | {per} | {rate.per_second:g} | {rate.burst:,} |" for what, per, rate in floods()]
    return "".join(f"{line}\n" for line in lines)


_TABLES = {"limits": _limits_table, "floods": _floods_table}


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
