"""The messages of the launcher while a job runs, and the data that it keeps of them for the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from collectived_launcher.hosts.output import Terminal
from collectived_launcher.launch import restarts
from collectived_launcher.launch.child import Child, Client, Daemon
from collectived_launcher.launch.job import COORDINATOR
from collectived_launcher.launch.job_state import Action, JobPhase, JobState, Policy, SignalRanks
from collectived_launcher.launch.summary import (
    ClientReport,
    ProcessFailure,
    format_summary,
    format_times,
    signal_name,
)
from collectived_proto.report.phrases import ranks_text


class JobMessages:
    """Each method reports one event, after the decision what to do about it."""

    def __init__(self, policy: Policy, terminal: Terminal) -> None:
        self._policy, self._terminal = policy, terminal
        self._failures: list[ProcessFailure] = []
        self._daemon_restarts: dict[str, Counter[str]] = {}  # daemon -> how it had ended -> how often

    def report_client_failure(self, client: Client, state: JobState, sent: int | None) -> None:
        """`sent` is the last signal that the launcher had sent it."""
        if client.rank in state.alive:
            again = f"starting it again ({state.restarts[client.rank]} of {self._policy.max_restarts})"
            if client.rank in state.pending_restarts:
                again = f"{again} as soon as {state.workers[client.rank]} serves"
            self._say(f"{client.describe()}: {client.describe_end()}; {again}")
            return
        self._record_failure(client, sent)
        if self._is_grace_starting(state):
            self._say(f"{client.describe()} failed: {client.describe_end()}; {self._describe_grace(state)}")

    def report_daemon_end(self, daemon: Daemon, state: JobState, now: float) -> None:
        watched = state.get_restart_state(daemon.name)
        often = len(watched.restart_times)
        words = [f"{daemon.describe()} died: {daemon.describe_end()}"]
        if watched.restart_at is not None:
            often += 1
            words.append(_describe_effect(daemon, state, "joins wait"))
            words.append(
                f"starting it again in {watched.restart_at - now:.1f} s ({often} of {self._policy.daemon_restarts})"
            )
        else:
            self._record_failure(daemon)
            words.append(_describe_effect(daemon, state, "new ones cannot be formed"))
            if often:
                words.append(
                    f"it was started again {format_times(often)} within {restarts.WINDOW / 60:g} min, which is all"
                )
            if self._is_grace_starting(state):
                words.append(self._describe_grace(state))
        self._say("; ".join(words))

    def report_daemon_timeout(self, daemon: Daemon) -> None:
        self._say(f"{daemon.describe()} was not ready within {self._policy.ready_timeout:g} s: killed")

    def count_daemon_restart(self, former: Daemon) -> None:
        self._daemon_restarts.setdefault(former.name, Counter())[former.describe_end()] += 1

    def report_signal(self, signum: int, actions: Sequence[Action]) -> None:
        self._say("; ".join([f"got {signal_name(signum)}", *_describe_signals(actions)]))

    def report_deadline(self, actions: Sequence[Action]) -> None:
        """A deadline has come."""
        if sending := _describe_signals(actions):
            self._say("; ".join(["some ranks are still running", *sending]))

    @property
    def has_failures(self) -> bool:
        return bool(self._failures)

    def print_summary(self, reports: Mapping[int, ClientReport], clients: Mapping[int, Client]) -> None:
        """The job is over."""
        failed = {failure.rank: failure for failure in self._failures}

        def describe_client(rank: int) -> ProcessFailure:
            return failed.get(rank) or _describe_failure(clients[rank], None)

        for line in format_summary(self._failures, self._daemon_restarts, reports, describe_client):
            self._terminal.say(line)

    def _say(self, text: str) -> None:
        self._terminal.say(f"collectived: {text}")

    def _record_failure(self, child: Child, sent: int | None = None) -> None:
        self._failures.append(_describe_failure(child, sent))

    def _is_grace_starting(self, state: JobState) -> bool:
        return state.phase is JobPhase.GRACE and len(self._failures) == 1 and bool(state.alive)

    def _describe_grace(self, state: JobState) -> str:
        return f"{ranks_text(state.alive)} may take {self._policy.grace:g} s to end"


def _describe_failure(child: Child, sent: int | None) -> ProcessFailure:
    rank = child.rank if isinstance(child, Client) else None
    return ProcessFailure(child.describe(), child.describe_end(), tuple(child.stderr_tail), sent, rank)


def _describe_effect(daemon: Daemon, state: JobState, new_groups: str) -> str:
    """Describe the effect of a lost daemon on the clients."""
    if daemon.name == COORDINATOR:
        return f"running groups go on, {new_groups}"
    ranks = [rank for rank, worker in sorted(state.workers.items()) if worker == daemon.name]
    return f"{ranks_text(ranks)} lost their worker; their groups get errors"


def _describe_signals(actions: Sequence[Action]) -> list[str]:
    return [f"sending {signal_name(a.signum)} to {ranks_text(a.ranks)}" for a in actions if isinstance(a, SignalRanks)]
