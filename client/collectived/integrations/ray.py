"""A job on a running Ray cluster: a worker daemon per node, and ranks that are actors.

    ray.init()
    with cd.integrations.ray.start(ranks_per_node=2) as job:
        print(job.run(lambda group: group.all_reduce("sum", group.rank)))

Ray places processes, restarts nodes and carries functions and results; daemons and ranks do collectives as elsewhere.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from collectived.arguments import check_integer
from collectived.errors import UnavailableError
from collectived.group import Group
from collectived.session import Session, connect
from collectived.testing.daemon import Daemon
from collectived_proto.options import CommunicationOptions

try:
    import ray
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "collectived.integrations.ray needs Ray: pip install 'collectived[ray]'", name="ray"
    ) from error

_START_TIMEOUT = 60.0  # seconds for every actor and its daemon
_END_TIMEOUT = 15.0


class RayJob:
    """A job whose daemons and ranks are actors of a Ray cluster; `start` makes it.

    Attributes:
        nodes: the identifiers of the Ray nodes, the one of worker 0 first.
        size: how many ranks there are, in blocks by node.
    """

    def __init__(self, name: str, nodes: Sequence[str], ranks: Sequence[Any]) -> None:
        self.nodes = tuple(nodes)
        self.size = len(ranks)
        self._name = name
        self._ranks = tuple(ranks)
        self._has_stuck_rank = False  # that waits for a dead one, in a run that has failed
        self._groups = (f"{name}-{number}" for number in itertools.count())

    def run(self, body: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """Call `body(group, *args)` as every rank of a new group, each in its actor.

        Args:
            body: the function of each rank, which Ray carries there. Leaving it by an exception aborts the group.
            args: the same for all ranks.
            timeout: seconds to wait for the others when joining, and the default of each collective.

        Returns:
            The results of all ranks, by rank.

        Raises:
            Exception: what `body` raised on the first rank to fail, as Ray raises it: it is a RayTaskError and also of
                the exception's own class. An actor that has died raises a RayActorError of Ray; other ranks, which may
                wait for it without end, are waited for no longer than 15 s.
            RuntimeError: a rank still waits in an earlier run that has failed.
        """
        if self._has_stuck_rank:
            raise RuntimeError("a rank still waits in an earlier run, which has failed: start another job")
        group = next(self._groups)
        calls = [rank.run.remote(body, args, group, timeout) for rank in self._ranks]
        pending = list(calls)
        failed: list[BaseException] = []
        while pending:  # one by one as they end: errors of others follow from the first one
            is_one_dead = any(isinstance(error, ray.exceptions.RayActorError) for error in failed)
            ended, pending = ray.wait(pending, timeout=_END_TIMEOUT if is_one_dead else None)
            if not ended:
                self._has_stuck_rank = True
                break
            try:
                ray.get(ended[0])
            except Exception as error:
                failed.append(error)
        if failed:
            raise failed[0]
        found: list[Any] = ray.get(calls)
        return found


@contextmanager
def start(
    ranks_per_node: int = 1, *, nodes: Sequence[str] | None = None, cpus_per_rank: float = 1, gpus_per_rank: float = 0
) -> Iterator[RayJob]:
    """Start a coordinator, a worker daemon on each node of the running Ray cluster and ranks beside it.

    They end with the block, and with the driver.

    Args:
        ranks_per_node: how many actors on each node.
        nodes: identifiers of the nodes, as `ray.nodes()` has them; None: all that live.
        cpus_per_rank, gpus_per_rank: what Ray reserves for each rank.

    Raises:
        ValueError: `ranks_per_node` is no whole number from 1, or no node is alive.
        RuntimeError: `ray.init()` has not been called.
        UnavailableError: an actor or its daemon did not start in time.
    """
    count = check_integer(ranks_per_node, "ranks_per_node", 1, 4096, "a whole number from 1")
    if not ray.is_initialized():
        raise RuntimeError("no Ray cluster is connected: call ray.init() first")
    chosen = list(nodes) if nodes is not None else [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    if not chosen:
        raise ValueError("nodes is empty: give identifiers of Ray nodes, or None for all that live")
    name, secret = f"ray-{secrets.token_hex(4)}", secrets.token_hex(32)
    with ExitStack() as stack:
        coordinator = _place(stack, _DaemonActor, chosen[0], 0, 0)
        (at,) = _await([coordinator.start_coordinator.remote(name, secret)], "the coordinator", chosen[:1])
        daemons = [_place(stack, _DaemonActor, node, 0, 0) for node in chosen]
        starting = [daemon.start_worker.remote(task, name, at, secret) for task, daemon in enumerate(daemons)]
        workers = _await(starting, "worker", chosen)
        size = count * len(chosen)
        ranks, starting = [], []
        for rank in range(size):
            task, local = divmod(rank, count)
            actor = _place(stack, _RankActor, chosen[task], cpus_per_rank, gpus_per_rank)
            environment = {
                "COLLECTIVED_WORKER": workers[task],
                "COLLECTIVED_JOB": name,
                "COLLECTIVED_GROUP": "world",
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(count),
                "GROUP_RANK": str(task),
            }
            ranks.append(actor)
            starting.append(actor.start.remote(environment))
        _await(starting, "rank", [node for node in chosen for _ in range(count)])
        yield RayJob(name, chosen, ranks)


def _place(stack: ExitStack, actor: Any, node: str, cpus: float, gpus: float) -> Any:
    """An actor on that node, which is closed with the stack."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    made = ray.remote(actor).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=where).remote()

    def end() -> None:
        with suppress(Exception):  # of a node that is lost, or an actor that never started
            ray.get(made.close.remote(), timeout=_END_TIMEOUT)
        with suppress(Exception):
            ray.kill(made)

    stack.callback(end)
    return made


def _await(calls: Sequence[Any], what: str, nodes: Sequence[str]) -> list[Any]:
    ended, pending = ray.wait(list(calls), num_returns=len(calls), timeout=_START_TIMEOUT)
    if pending:
        late = [number for number, call in enumerate(calls) if call in pending]
        raise UnavailableError(
            f"{what} {late[0]} did not start on Ray node {nodes[late[0]]} within {_START_TIMEOUT:g} s; has it the CPUs "
            "and GPUs that each rank asks for (cpus_per_rank, gpus_per_rank)?"
        )
    found: list[Any] = ray.get(list(calls))
    return found


class _DaemonActor:
    """Holds a daemon, which ends with it."""

    def __init__(self) -> None:
        self._daemon: Daemon | None = None
        self._folder = tempfile.mkdtemp(prefix="cd-", dir="/tmp")  # short: a socket's path has 107 bytes at most

    def start_coordinator(self, job: str, secret: str) -> str:
        address = ray.util.get_node_ip_address()
        return self._start(["coordinator", "--job", job, "--listen", f"{address}:0"], secret)

    def start_worker(self, task: int, job: str, coordinator: str, secret: str) -> str:
        address = ray.util.get_node_ip_address()
        options = ["--coordinator", coordinator, "--folder", self._folder, "--link-listen", f"{address}:0"]
        return self._start(["worker", "--job", job, "--task", str(task), *options], secret)

    def _start(self, arguments: Sequence[str], secret: str) -> str:
        self._daemon = Daemon(arguments, secret)
        return str(self._daemon.wait_ready(_START_TIMEOUT)["address"])

    def close(self) -> None:
        try:
            if self._daemon is not None:
                self._daemon.close()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)


class _RankActor:
    """One rank; its process keeps its session from one run to the next."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def start(self, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        self._session = connect()

    def run(self, body: Callable[..., Any], args: Sequence[Any], group: str, timeout: float | None) -> Any:
        assert self._session is not None
        options = CommunicationOptions(timeout_seconds=timeout)
        with self._session.join(group, timeout=timeout, options=options) as joined:
            return _call(body, joined, args)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()


def _call(body: Callable[..., Any], group: Group, args: Sequence[Any]) -> Any:
    return body(group, *args)
