"""The summary at the end of a job: the root cause first, because the other failures are mostly its consequences."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from collectived_proto.report.phrases import ranks_text, sanitize_text


@dataclass(frozen=True, slots=True)
class ProcessFailure:
    """How one process ended: its name and its end, in words; `last_signal` is the last signal that the launcher
    had sent it, if any; `rank` is None of a daemon."""

    process: str
    reason: str
    stderr_tail: tuple[str, ...] = ()
    last_signal: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.process}: {self.describe_end()}"

    def describe_end(self) -> str:
        sent = "" if self.last_signal is None else f", after the launcher had sent {signal_name(self.last_signal)}"
        return f"{self.reason}{sent}"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:  # a real-time signal
        return f"signal {signum}"


def describe_status(status: int) -> str:
    """`Popen.returncode` in words."""
    return f"killed by signal {-status} ({signal_name(-status)})" if status < 0 else f"exit status {status}"


def format_times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


@dataclass(frozen=True, slots=True)
class ClientReport:
    """A client's report of its end (`collectived.connection.failure_file`): the exception that ended it.

    blamed: the ranks of the job that the verdict behind it blames; none where it failed by itself.
    """

    error: str
    traceback: tuple[str, ...] = ()
    blamed: tuple[int, ...] = ()
    verdict: str = ""


def read_reports(answers: Mapping[int, Any], clients: Mapping[int, tuple[int, int]]) -> dict[int, ClientReport]:
    """The reports of clients by rank, from what they wrote; without those that say what no client writes.

    Args:
        clients: rank -> its worker and process.
    """
    own = {rank: answer["pid"] for rank, answer in answers.items() if isinstance(answer, dict) and "pid" in answer}
    ranks = {(worker, own.get(rank, pid)): rank for rank, (worker, pid) in clients.items()}

    def find_rank(member: Sequence[int], size: int) -> int | None:
        # The number counts where the group is the job. Its process is another where a shell runs the program.
        rank, worker, pid = member
        return ranks.get((worker, pid), rank if size == len(clients) and rank in clients else None)

    found = {}
    for rank, answer in answers.items():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            blamed = (find_rank(member, answer["size"]) for member in answer["blamed"])
            lines = tuple(sanitize_text(str(line)) for line in answer["traceback"])
            error, verdict = (" ".join(sanitize_text(str(answer[name])).split()) for name in ("error", "verdict"))
            found[rank] = ClientReport(error, lines, tuple(one for one in blamed if one is not None), verdict)
    return found


def find_root_cause(ended: Sequence[int], reports: Mapping[int, ClientReport]) -> int | None:
    """The rank whose failure no verdict explains: from the first that one does explain, follow the rank that it blames.

    Args:
        ended: ranks that failed, in the order of their ends.

    Returns:
        None where no report names it.
    """
    explained = [rank for rank in ended if rank in reports and reports[rank].blamed]
    if not explained:
        return next((rank for rank in ended if rank in reports), None)
    rank, seen = explained[0], set[int]()
    while rank not in seen and rank in reports and reports[rank].blamed and rank not in reports[rank].blamed:
        seen.add(rank)
        blamed = reports[rank].blamed
        rank = next((other for other in ended if other in blamed), blamed[0])
    return rank


def format_summary(
    failures: Sequence[ProcessFailure],
    started_again: Mapping[str, Mapping[str, int]],
    reports: Mapping[int, ClientReport],
    describe_client: Callable[[int], ProcessFailure],
) -> Iterable[str]:
    """Lines about what failed: the root cause, those who failed in consequence, others in the order of their ends.

    Those about daemons that were started again come first, for their ends are mostly why.

    Args:
        started_again: daemon -> in words how it had ended -> how often.
        describe_client: a rank that is blamed, and need not have failed.
    """
    for name, ends in started_again.items():
        how = [end if len(ends) == 1 else f"{end} {format_times(count)}" for end, count in ends.items()]
        yield f"collectived: {name} was started again {format_times(sum(ends.values()))}: {', '.join(how)}"
    if not failures:
        return
    root, what = failures[0], "first failure"
    if root.rank is not None:  # a daemon that is lost for good is why clients fail
        rank = find_root_cause([failure.rank for failure in failures if failure.rank is not None], reports)
        if rank is not None:
            root, what = describe_client(rank), "root cause"
    report = reports.get(root.rank) if root.rank is not None else None
    verdict = next((one.verdict for one in reports.values() if root.rank in one.blamed), "")
    why = report.error if report else verdict
    if why and root.last_signal is not None:  # that it was ended at last is no cause
        yield f"collectived: {what}: {root.process}: {why}; its end: {root.describe_end()}"
    else:
        yield f"collectived: {what}: {root}{f': {why}' if why else ''}"
    yield from (f"    {line}" for line in (report.traceback if report and report.traceback else root.stderr_tail))
    others = [failure for failure in failures if failure.process != root.process]
    consequences = [failure for failure in others if _is_consequence(failure, reports)]
    if consequences:
        yield f"collectived: failed in consequence: {_list_ranks(consequences)}"
    yield from (f"collectived: then: {failure}" for failure in others if failure not in consequences)


def _is_consequence(failure: ProcessFailure, reports: Mapping[int, ClientReport]) -> bool:
    """Whether a verdict, or the launcher, ended it."""
    if failure.rank is None:
        return False
    return failure.last_signal is not None or (failure.rank in reports and bool(reports[failure.rank].blamed))


def _list_ranks(failures: Sequence[ProcessFailure]) -> str:
    """Ranks by how they ended: `ranks 0, 2: exit status 1; rank 3: killed by signal 15 (SIGTERM)`."""
    by_end: dict[str, list[int]] = {}
    for failure in failures:
        by_end.setdefault(failure.describe_end(), []).append(failure.rank or 0)
    return "; ".join(f"{ranks_text(ranks)}: {end}" for end, ranks in by_end.items())
