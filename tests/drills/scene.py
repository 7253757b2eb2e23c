"""What happens in a cell: ranks that join, submit and hear; bystanders; and what must be true when it is over."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from tests.drills.cell import VICTIM, Cell
from tests.drills.cluster import Cluster
from tests.drills.history import Event, Outcome, Submit, check
from tests.drills.limits import Limit, Pace
from tests.drills.processes import Answer, RankProcess
from tests.drills.proxy import Connection

from collectived_proto.errors import Code, error_class
from collectived_proto.types import unscoped_name

PROMISED_SECONDS = 0.25  # after its deadline a collective has ended everywhere
SEVERAL_ROUNDS = 1 << 16  # elements, 512 KiB: more than three workers send in one round, so nobody is done before all
BYSTANDERS_SECONDS = 5.0  # the timeout of those who are not to notice anything
_names = itertools.count(1)


class Scene:
    """One group of rank processes on a cluster, and what is done to it.

    Attributes:
        ranks: the processes by rank. others: all but the victim. heard: seconds from the fault until the last rank had
            its outcome. error, named: what they were told.
    """

    def __init__(self, cell: Cell, cluster: Cluster, seed: int, pace: Pace) -> None:
        self.cell = cell
        self.cluster = cluster
        self._pace = pace
        self.limit = Limit(cell.cap)
        self.random = random.Random(f"{seed} {cell.name}")
        self.group = f"{cell.target}-{next(_names)}".replace(" ", "-")
        self.timeout = cell.deadline or None
        self.ranks: list[RankProcess] = []
        self.bystanders: list[RankProcess] = []
        self.heard: float | None = None
        self.error = ""
        self.named: tuple[int, ...] = ()
        self.notes: list[str] = []
        self.generation = 0
        self.struck_at = 0.0
        self.links_seen: list[Connection] = []
        self.rejoined: list[float] = []  # seconds that each return of the group took
        self._seated: set[RankProcess] = set()
        self._beside: list[Scene] = []
        self._cast: list[RankProcess] = []  # everybody who was ever a rank of the group
        self._asked: dict[int, Answer] = {}  # what each rank is doing, by rank

    def beside(self, cell: Cell) -> Scene:
        """Another group on the same cluster, under the same cap."""
        scene = Scene(cell, self.cluster, 0, self._pace)
        scene.limit = self.limit
        self._beside.append(scene)
        return scene

    # Who takes part

    @property
    def size(self) -> int:
        return len(self.cell.placement)

    @property
    def victim(self) -> RankProcess:
        return self.ranks[VICTIM]

    @property
    def submitted(self) -> int:
        """How many instances of the current generation somebody has submitted."""
        numbers = [
            event.instance
            for process in self.ranks
            for event in list(process.events)
            if isinstance(event, Submit) and event.generation == self.generation
        ]
        return 1 + max(numbers, default=-1)

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != VICTIM]

    @property
    def everybody(self) -> list[int]:
        return list(range(self.size))

    def begin(self) -> None:
        """Everybody joins, and the first sum goes well."""
        if self.cell.alone:
            return
        self.ranks = [self.hire(task) for task in self.cell.placement]
        spared = [task for task in range(self.cell.workers) if task != self.cell.hit]
        if self.cell.bystanders and spared:
            self.bystanders = [self.cluster.hire(task) for task in (spared * 2 if len(spared) == 1 else spared)]
            self.join(self.bystanders, f"{self.group}-bystanders")
        (self.generation,) = self.join(self.ranks, self.group)
        self._seated = set(self.ranks)
        self.submit(self.everybody)
        self.succeed(self.everybody)
        self.agree()

    def join(self, processes: Sequence[RankProcess], name: str) -> set[int]:
        """These processes connect and join a group, in order of rank; the generation, alike on all."""
        connecting = [p.ask("connect", worker=self.way(p)) for p in processes]
        for answer in connecting:
            answer.value(self.limit)
        size = len(processes)
        joining = [p.ask("join", name=name, size=size, rank=rank) for rank, p in enumerate(processes)]
        generations = {answer.value(self.limit)["generation"] for answer in joining}
        assert len(generations) == 1, f"ranks of one group are in generations {generations}"
        return generations

    def way(self, process: RankProcess) -> str:
        """The address at which this process is to find its worker."""
        ways = self.cluster.far_addresses if self.cell.remote else self.cluster.addresses
        return ways[process.worker]

    def hire(self, task: int) -> RankProcess:
        """A process that takes part in the cell, and whose history is checked with those of the others."""
        process = self.cluster.hire(task)
        self._cast.append(process)
        return process

    # What ranks do

    def submit(self, ranks: Iterable[int], do: str = "sum", **arguments: Any) -> None:
        """These ranks sum vectors of their rank + 1, each with the cell's timeout; nobody waits for them here."""
        for rank in ranks:
            self.ask([rank], do, **{"fill": rank + 1.0, "timeout": self.timeout, **arguments})

    def ask(self, ranks: Iterable[int], do: str, **arguments: Any) -> None:
        """These ranks do something whose outcome is looked at later."""
        for rank in ranks:
            self._asked[rank] = self.ranks[rank].ask(do, **arguments)

    def answered(self, rank: int) -> bool:
        """Whether what this rank was asked for has ended."""
        return self._asked[rank].there

    def strike(self) -> None:
        """Now the fault happens."""
        self.struck_at = time.monotonic()

    def until_waiting(self, arrived: Collection[int]) -> None:
        """Returns when the workers show an instance at which exactly these ranks have arrived."""
        tasks = sorted({self.cell.placement[rank] for rank in arrived})

        def shown() -> bool:
            seen: dict[int, set[int]] = {}
            for group_loop in self.cluster.group_loops(self.group, tasks):
                for instance in group_loop.in_flight:
                    seen.setdefault(instance.instance, set()).update(instance.arrived)
            return any(set(arrived) == ranks for ranks in seen.values())

        self.limit.until(shown, f"an instance at which ranks {sorted(arrived)} have arrived")

    def until_submitted(self, rank: int, instances: int) -> None:
        """Returns when the worker of this rank shows that it has arrived at so many instances."""

        def shown() -> bool:
            group_loops = self.cluster.group_loops(self.group, [self.cell.placement[rank]])
            return (
                sum(rank in instance.arrived for group_loop in group_loops for instance in group_loop.in_flight)
                == instances
            )

        self.limit.until(shown, f"{instances} instances at which rank {rank} has arrived")

    def until_warned(self, *words: str) -> None:
        """Returns when the coordinator has warned of this group with all these words."""

        def warned() -> bool:
            lines = (line for line in list(self.cluster.coordinator.log) if f"{self.group!r}" in line)
            return any(all(word in line for word in words) for line in lines)

        self.limit.until(warned, f"a warning of group {self.group} with {words}")

    def until_forming(self, name: str, present: int) -> None:
        """Returns when so many wait for the others of a group."""

        def forming() -> bool:
            groups = self.cluster.status(0, 2.0, local_only=False).groups
            return any(
                unscoped_name(g.name) == name and len(g.members) == present for g in groups if g.state == "forming"
            )

        self.limit.until(forming, f"{present} ranks that wait for others of group {name}")

    def links(self, one: int, other: int) -> list[Connection]:
        """The links of the group between two workers."""
        found = self.cluster.links(one, other, self.generation)
        self.links_seen += found
        return found

    # What ranks hear

    def outcomes(self, ranks: Iterable[int]) -> dict[int, Outcome]:
        """The latest outcome of these ranks, once what they were asked for has ended."""
        found = {}
        for rank in ranks:
            self._asked.pop(rank).get(self.limit)
            found[rank] = self.ranks[rank].outcomes()[-1]
        return found

    def succeed(self, ranks: Iterable[int]) -> None:
        """What these ranks have submitted ends well; that sums are right is for the history to say."""
        found = self.outcomes(ranks)
        failed = {rank: outcome for rank, outcome in found.items() if outcome.code is not Code.OK}
        assert not failed, f"expected success, got {_shown(failed)}"
        if self.struck_at and self.heard is None:
            self.heard = max(outcome.at for outcome in found.values()) - self.struck_at
            self.error = "success"

    def hear(
        self,
        code: Code,
        named: Collection[int] | Callable[[tuple[int, ...]], bool] = (VICTIM,),
        *,
        ranks: Iterable[int] | None = None,
        words: Sequence[str] = (),
        within: float | None = None,
        note: bool = True,
    ) -> None:
        """What these ranks (all but the victim) have submitted fails with this code, these missing ranks, these words.

        Args:
            within: seconds since the fault; for what is to be noticed at once, however far the deadline is.
        """
        found = self.outcomes(self.others if ranks is None else ranks)
        fits = named if callable(named) else lambda missing: missing == tuple(sorted(named))
        for rank, outcome in found.items():
            culprits = outcome.differing if code is Code.INVALID_ARGUMENT else outcome.missing
            if outcome.code is not code or not fits(culprits) or not all(word in outcome.text for word in words):
                wanted = f"{code.name} naming {'the right ranks' if callable(named) else sorted(named)} {list(words)}"
                raise AssertionError(f"rank {rank}: expected {wanted}, got {_shown({rank: outcome})}")
        heard = max(outcome.at for outcome in found.values()) - self.struck_at
        allowed = (within or 0.0) + self.late
        assert within is None or heard <= allowed, f"heard after {heard:.3f} s instead of within {allowed:.3f} s"
        if note:
            self.tell(heard, next(iter(found.values())))

    def tell(self, heard: float, outcome: Outcome) -> None:
        """For the table: after how many seconds the last rank heard this."""
        self.heard = heard
        self.error = error_class(outcome.code).__name__
        self.named = outcome.differing if outcome.code is Code.INVALID_ARGUMENT else outcome.missing

    def alike(self, ranks: Iterable[int] | None = None) -> None:
        """Further calls of these ranks fail at once with the verdict that they have heard."""
        asked = list(self.others if ranks is None else ranks)
        before = {rank: self.ranks[rank].outcomes()[-1] for rank in asked}
        self.submit(asked)
        for rank, outcome in self.outcomes(asked).items():
            assert outcome.verdict == before[rank].verdict, _shown({rank: outcome})

    def agree(self) -> None:
        """The bystanders, a group on the same workers, sum as if nothing had happened."""
        asked = [
            process.ask("sum", fill=rank + 1.0, timeout=BYSTANDERS_SECONDS)
            for rank, process in enumerate(self.bystanders)
        ]
        for process, answer in zip(self.bystanders, asked, strict=True):
            answer.get(self.limit)
            outcome = process.outcomes()[-1]
            assert outcome.code is Code.OK, f"bystanders noticed: {_shown({outcome.rank: outcome})}"

    def replace(self, *ranks: int) -> None:
        """The processes of these ranks are gone; new ones will come in their place."""
        for rank in ranks:
            self.ranks[rank].go_on()
            self.ranks[rank].gone()
            self.ranks[rank].kill()
            self.ranks[rank] = self.hire(self.cell.placement[rank])

    def again(self) -> None:
        """The group goes on in a new generation: who was in it rejoins, and new processes join."""
        begin = time.monotonic()
        asked = []
        for rank, process in enumerate(self.ranks):
            if process in self._seated and rank not in self.cell.orphans:
                asked.append(process.ask("rejoin"))
            else:
                process.ask("connect", worker=self.way(process))
                asked.append(process.ask("join", name=self.group, size=self.size, rank=rank))
        found = [answer.value(self.limit) for answer in asked]
        self.rejoined.append(time.monotonic() - begin)
        self._seated = set(self.ranks)
        assert [one["rank"] for one in found] == self.everybody, f"the ranks that joined again are {found}"
        (generation,) = {one["generation"] for one in found}
        assert generation > self.generation, f"generation {generation} after {self.generation}"
        self.generation = generation
        self.submit(self.everybody)
        self.succeed(self.everybody)
        self.agree()

    # The end

    @property
    def late(self) -> float:
        """How late this machine has been at waking a thread, in seconds: forgiven wherever clocks are compared."""
        return self._pace.late

    def history(self) -> list[Event]:
        return [event for process in self._cast for event in list(process.events)]

    def violations(self) -> list[str]:
        allowance = PROMISED_SECONDS + self.cell.grace + self.late
        found = check(self.history(), allowance, self.cell.orphans)
        theirs = check([event for process in self.bystanders for event in process.events], PROMISED_SECONDS + self.late)
        return found + [f"bystanders: {violation}" for violation in theirs]

    def end(self) -> None:
        """Everybody leaves, and no group loop of the group is left."""
        everybody = [*dict.fromkeys([*self.ranks, *self.bystanders, *self._cast])]
        self._cast.clear()
        closing = [(process, process.ask("close")) for process in everybody if process.alive and not process.spoilt]
        for _, answer in closing:
            answer.get(self.limit)
        tasks = list(range(self.cell.workers))
        self.limit.until(lambda: not self.cluster.group_loops(self.group, tasks), "the end of the group's group loops")
        for process in everybody:
            self.cluster.dismiss(process)

    def abandon(self) -> None:
        """Ends the processes of a cell that has failed."""
        for scene in self._beside:
            scene.abandon()
        for process in [*dict.fromkeys([*self.ranks, *self.bystanders, *self._cast])]:
            if process.alive:
                process.kill()
            process.close()


def _shown(outcomes: dict[int, Outcome]) -> str:
    return "; ".join(f"rank {rank}: {outcome.verdict} ({outcome.text})" for rank, outcome in outcomes.items())
