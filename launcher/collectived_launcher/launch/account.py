"""What the launcher says while a job runs, and what it keeps of it for the summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from collectived_launcher.launch import restarts
from collectived_launcher.launch.child import Child, Client, Daemon
from collectived_launcher.launch.job import COORDINATOR
from collectived_launcher.launch.output import Terminal
from collectived_launcher.launch.summary import Ending, signal_name, summary, times
from collectived_launcher.launch.supervise import Action, Phase, Policy, Send, State


class Account:
    """Each method tells of one event, after it was decided what to do about it."""

    def __init__(self, policy: Policy, terminal: Terminal) -> None:
        self._policy, self._terminal = policy, terminal
        self._failures: list[Ending] = []
        self._started_again: dict[str, Counter[str]] = {}  # daemon -> how it had ended -> how often

    def client_failed(self, client: Client, state: State, sent: int | None) -> None:
        """`sent` is the last signal that the launcher had sent it."""
        if client.rank in state.alive:
            again = f"starting it again ({state.restarts[client.rank]} of {self._policy.max_restarts})"
            if client.rank in state.held:
                again = f"{again} as soon as {state.workers[client.rank]} serves"
            self._say(f"{client.describe()}: {client.describe_end()}; {again}")
            return
        self._note(client, sent)
        if self._begins_grace(state):
            self._say(f"{client.describe()} failed: {client.describe_end()}; {self._grace(state)}")

    def daemon_ended(self, daemon: Daemon, state: State, now: float) -> None:
        watched = state.watched(daemon.name)
        often = len(watched.restarts)
        words = [f"{daemon.describe()} died: {daemon.describe_end()}"]
        if watched.due is not None:
            often += 1
            words.append(_effect(daemon, state, "joins wait"))
            words.append(f"starting it again in {watched.due - now:.1f} s ({often} of {self._policy.daemon_restarts})")
        else:
            self._note(daemon)
            words.append(_effect(daemon, state, "new ones cannot be formed"))
            if often:
                words.append(f"it was started again {times(often)} within {restarts.WINDOW / 60:g} min, which is all")
            if self._begins_grace(state):
                words.append(self._grace(state))
        self._say("; ".join(words))

    def daemon_late(self, daemon: Daemon) -> None:
        self._say(f"{daemon.describe()} was not ready within {self._policy.ready_within:g} s: killed")

    def daemon_started_again(self, former: Daemon) -> None:
        self._started_again.setdefault(former.name, Counter())[former.describe_end()] += 1

    def signalled(self, signum: int, actions: Sequence[Action]) -> None:
        self._say("; ".join([f"got {signal_name(signum)}", *_sending(actions)]))

    def sends(self, actions: Sequence[Action]) -> None:
        """A deadline has come."""
        if sending := _sending(actions):
            self._say("; ".join(["some ranks are still running", *sending]))

    def close(self) -> None:
        """The job is over."""
        for line in summary(self._failures, self._started_again):
            self._terminal.say(line)

    def _say(self, text: str) -> None:
        self._terminal.say(f"collectived: {text}")

    def _note(self, child: Child, sent: int | None = None) -> None:
        assert child.status is not None
        self._failures.append(Ending(child.describe(), child.describe_end(), tuple(child.last_words), sent))

    def _begins_grace(self, state: State) -> bool:
        return state.phase is Phase.GRACE and len(self._failures) == 1 and bool(state.alive)

    def _grace(self, state: State) -> str:
        return f"{_ranks(sorted(state.alive))} may take {self._policy.grace:g} s to end"


def _effect(daemon: Daemon, state: State, new_groups: str) -> str:
    """What the loss of a daemon means for the clients."""
    if daemon.name == COORDINATOR:
        return f"running groups go on, {new_groups}"
    ranks = [rank for rank, worker in sorted(state.workers.items()) if worker == daemon.name]
    return f"{_ranks(ranks)} lost their worker; their groups get errors"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _sending(actions: Sequence[Action]) -> list[str]:
    return [f"sending {signal_name(a.signum)} to {_ranks(a.ranks)}" for a in actions if isinstance(a, Send)]
