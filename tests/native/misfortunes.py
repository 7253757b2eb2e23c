"""One random run of the model: seats, collectives, a memory, a misfortune at a random step; then what must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from tests.native.machine import WORKER, Violation
from tests.native.memory_models import StoreBuffers, WeakMemory
from tests.native.model import Contract, Job, World

MISFORTUNES = ("none", "kill", "abort", "leave", "stop", "worker", "differ", "differ and absent", "withdraw")
CAUSES = ("differ", "differ and absent", "withdraw")
EVENTFUL = ("none", "withdraw", "differ")
CONTRACTS = (
    Contract(),
    Contract(),
    Contract(steps=1),
    Contract(steps=2),
    Contract(steps=4),
    Contract(steps=2, depth=1),
    Contract(steps=3, depth=1),
    Contract(meets=True, steps=2, depth=1),
    Contract(meets=True, steps=2, long=frozenset({0})),
    Contract(meets=True, steps=1, depth=1, long=frozenset({0, 1})),
    Contract(meets=True, steps=1, depth=1, describes=True),
    Contract(meets=True, steps=1, long=frozenset({1}), describes=True),
)


Place = tuple[str, int]  # function and line of the model


@dataclass
class Scenario:
    """What happens in one run; `aim`: kill or stop whoever comes to this step of the protocol first."""

    seats: int
    contracts: list[Contract]
    misfortune: str
    victim: int
    cause: str  # what goes wrong at seat `origin` besides
    origin: int
    at: int
    window: int
    hosts: bool
    weak: bool
    aim: Place | None = None
    has_hit: bool = False

    @classmethod
    def draw(cls, chance: Random, misfortunes: tuple[str, ...] = MISFORTUNES) -> Scenario:
        seats = chance.choice((2, 2, 3, 3, 4, 5))
        misfortune = chance.choice(misfortunes)
        hosts = chance.random() < 0.15 and misfortune != "differ and absent"
        has_cause = misfortune in CAUSES or (not hosts and chance.random() < 0.2)
        cause = misfortune if misfortune in CAUSES else chance.choice(CAUSES) if has_cause else ""
        is_withdrawn = cause == "withdraw"
        contracts = [
            Contract() if hosts else chance.choice(CONTRACTS) for _ in range(chance.choice((1, 2, 3)) + is_withdrawn)
        ]
        return cls(
            seats,
            contracts,
            misfortune,
            victim=chance.randrange(seats - hosts),
            cause="" if misfortune in ("none", "leave") else cause,
            origin=chance.randrange(seats - hosts),
            at=chance.randrange(1, 60 * seats * len(contracts)),
            window=4 if is_withdrawn else chance.choice((1, 1, 3)),
            hosts=hosts,
            weak=chance.random() < 0.5,
        )

    def run(self, chance: Random, fault: str = "", observe: Callable[[Place], None] | None = None) -> World:
        """Run it to its end, showing `observe` each step that a rank is about to take.

        Raises:
            Violation: a promise was broken.
        """
        world = World(self.seats, WeakMemory if self.weak else StoreBuffers, chance, hosts=self.hosts, fault=fault)
        for e in world.engines:
            self._start(world, e.seat)
        if chance.random() < 0.3:
            world.threads["joiners"] = world.announce_joiners()
        world.run(watch_places(world, observe) if observe else self._strike(world))
        self._judge(world)
        return world

    def _start(self, world: World, seat: int) -> None:
        jobs = [Job(contract, n) for n, contract in enumerate(self.contracts)]
        if self.cause.startswith("differ") and seat == self.origin:
            jobs[-1].digest = "other"
        comes = len(jobs)
        if self.misfortune == "leave" and seat == self.victim:
            comes -= 1
        if self.cause == "differ and absent" and self.seats > 2 and seat == (self.origin + 1) % self.seats:
            comes -= 1
        if self.cause == "withdraw" and seat == self.origin:
            jobs[-1].withdraws = True
        e, jobs = world.engines[seat], jobs[:comes]
        world.threads[seat, "main"] = world.rank(e, jobs, self.window)
        if self.window > 1:
            world.threads[seat, "engine"] = world.engine_thread(e, jobs)

    def _strike(self, world: World) -> Iterator[None]:
        yield from self._await_moment(world)
        main = (self.victim, "main")
        if self.misfortune == "kill" and main in world.threads:
            world.kill(self.victim)
            yield from self._watch(world, self.victim, "LOST")
        elif self.misfortune == "leave":
            while main in world.threads:
                yield
            world.memory.learn(WORKER, main)
            yield from self._watch(world, self.victim, "LEFT")
        elif self.misfortune == "abort":
            world.threads[WORKER] = world.end_now("ABORTED")
        elif self.misfortune == "stop" and main in world.threads:
            yield from self._stop(world)
        elif self.misfortune == "worker":
            world.worker_gone = True
            if self.hosts:
                world.kill(self.seats - 1)

    def _await_moment(self, world: World) -> Iterator[None]:
        if self.aim:
            while not (there := [one for one in world.ranks() if world.place_of(one) == self.aim]):
                if not world.threads:
                    return
                yield
            self.victim, self.has_hit = there[0][0], True
            return
        for _ in range(0 if self.misfortune == "leave" else self.at):
            yield

    def _watch(self, world: World, seat: int, reason: str) -> Iterator[None]:
        world.threads[WORKER] = world.lost(seat, reason)
        while any(contract.long for contract in self.contracts) and world.threads:
            if not world.ready():  # who waits knocks, and the worker looks again
                world.threads[WORKER] = world.lost(seat, reason)
            yield

    def _stop(self, world: World) -> Iterator[None]:
        """The victim is stopped until all others are idle; then a deadline passes, and later it goes on."""
        world.stopped = self.victim
        looks = 0
        while looks < 3:
            looks += not world.ready()
            yield
        decider = WORKER if world.chance.random() < 0.5 else next(s for s in range(self.seats) if s != self.victim)
        world.threads[WORKER] = world.expire(world.memory.latest("decided")[0], decider)
        while WORKER in world.threads:
            yield
        for _ in range(world.chance.choice((0, 10, 200))):
            yield
        world.stopped = None
        world.asleep.clear()

    @property
    def has_absentees(self) -> bool:
        return self.misfortune == "leave" or self.cause == "differ and absent"

    def _judge(self, world: World) -> None:
        decided = world.memory.latest("decided")
        absent = {self.victim, (self.origin + 1) % self.seats}  # these may have had less to do
        ends = {
            one: end
            for one, end in world.results.items()
            if isinstance(one, tuple)
            and one[1] == "main"
            and not (not end[1] and self.has_absentees and one[0] in absent)
        }
        if len(set(ends.values())) > 1:
            raise Violation(f"survivors disagree: {ends}, decided is {decided}")
        completed = decided[0]
        if self.misfortune == "none" and decided[2:] != ("",):
            raise Violation(f"it failed without a cause: {decided}")
        if not decided[2] and completed != len(self.contracts) and not self.has_absentees:
            raise Violation(f"only {completed} of {len(self.contracts)} are complete: {decided}")
        if self.misfortune.startswith("differ") and decided[2] != "MISMATCH":
            raise Violation(f"contracts differ, and decided is {decided}")
        if decided[2] == "LOST" and completed < world.memory.latest(("progress", self.victim))[0]:
            raise Violation(f"seat {self.victim} had contributed to instance {completed}, which failed")
        for one, end in ends.items():
            if end[1] and end[:3] != (decided[0], decided[2], decided[1]):
                raise Violation(f"{one} was told {end}, decided is {decided}")


def watch_places(world: World, observe: Callable[[Place], None]) -> Iterator[None]:
    while world.threads:
        for thread in world.ranks():
            observe(world.place_of(thread))
        yield


def list_places(runs: int, seed: int) -> dict[Place, list[str]]:
    """Return every step at which threads of ranks have been seen, with the names of some runs that pass there."""
    places: dict[Place, list[str]] = {}
    for number in range(runs):
        name, seen = f"{seed}.{number}", set[Place]()
        chance = Random(name)
        Scenario.draw(chance, EVENTFUL).run(chance, observe=seen.add)
        for place in seen:
            places.setdefault(place, []).append(name)
    return places


def strike_at(place: Place, name: str, misfortune: str) -> None:
    """Repeat that run until somebody comes to `place`, and let it happen there.

    Raises:
        Violation: a promise was broken, or nobody came there.
    """
    chance = Random(name)
    scenario = Scenario.draw(chance, EVENTFUL)
    scenario.misfortune, scenario.aim = misfortune, place
    scenario.run(chance)
    if not scenario.has_hit:
        raise Violation(f"nobody came to {place} in run {name}")


def search(fault: str, runs: int, seed: int, misfortunes: tuple[str, ...] = MISFORTUNES) -> str:
    """Return what the first of so many runs finds, or ''."""
    for number in range(runs):
        chance = Random(f"{seed}.{number}")
        scenario = Scenario.draw(chance, misfortunes)
        try:
            scenario.run(chance, fault)
        except Violation as violation:
            return f"{fault or 'the protocol'}, run {number}: {violation} in {scenario}"
    return ""
