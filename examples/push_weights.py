"""Pushes weights every two seconds from a training job to the inference processes of another job, while both go on.

    collectived launch --clients 2 -- python examples/push_weights.py train
    COLLECTIVED_JOB=serving python examples/push_weights.py serve      # from other shells, as often as you like

The jobs meet in the group `/weights`, which belongs to the whole cluster and is elastic: a server that is killed is
gone from the next generation, and a new one is let in after the next push. If the trainer goes away, the servers keep
their last weights. Neither job waits for the other: each has a thread that takes part in the group. If the jobs run on
several hosts, all of them use the same daemons. SIGTERM ends either in good order.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # read when NumPy is imported: processes share cores

import hashlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

import collectived as cd

FEWEST, MOST, SETTLE = 2, 16, 0.5  # members of /weights; seconds to wait for more of them
PUSH_EVERY = float(os.environ.get("PUSH_EVERY", "2"))  # seconds
LAST_PUSH = 5.0  # seconds that the trainer waits at its end; there may be no server that takes a push
STEP_SECONDS = 0.005  # a step of a larger model takes longer than this one's
ROWS, COLUMNS, LEARNING_RATE = 2048, 64, 1e-3
OPTIONS = cd.CommunicationOptions(timeout_seconds=30)
SERVER = -1  # servers give it in place of a step

Array = NDArray[np.float64]


@dataclass
class Model:
    """Weights and their step, replaced together, because other threads read them."""

    now: tuple[int, Array] = field(default_factory=lambda: (0, np.zeros(COLUMNS)))

    def __str__(self) -> str:
        step, weights = self.now
        return f"step {step}, weights {hashlib.sha256(weights.tobytes()).hexdigest()[:12]}"


def load(seed: int) -> tuple[Array, Array]:
    """Inputs and answers that follow the same rule for every seed."""
    truth = np.random.default_rng(1).standard_normal(COLUMNS)
    draw = np.random.default_rng([1, seed])
    inputs = draw.standard_normal((ROWS, COLUMNS))
    return inputs, inputs @ truth + 0.1 * draw.standard_normal(ROWS)


# The group that both jobs share


class Membership(threading.Thread):
    """Takes part in `/weights`, one generation after the other, until `part` returns that it is over, or `leave`.

    Args:
        step: returns the step of this process, or SERVER.
        part: is called in each generation, with the trainer's rank or None; returns whether all is over.
    """

    def __init__(self, step: Callable[[], int], part: Callable[[cd.Group, int | None], bool]) -> None:
        super().__init__(daemon=True)
        self._step, self._part = step, part
        self._session: cd.Session | None = None
        self._leaving = threading.Event()

    def leave(self) -> None:
        """End it at whatever point it is."""
        self._leaving.set()
        if self._session is not None:
            self._session.close()
        self.join(5)

    def run(self) -> None:
        over = False
        while not over and not self._leaving.is_set():
            try:
                with cd.connect(timeout=60) as self._session:
                    over = self._generations(self._session)
            except cd.errors.UnavailableError:  # no worker yet, or it is lost: connect to the next one
                self._leaving.wait(SETTLE)
            except cd.errors.CollectiveError:
                if not self._leaving.is_set():
                    raise

    def _generations(self, session: cd.Session) -> bool:
        group = session.join("/weights", (FEWEST, MOST), settle=SETTLE, options=OPTIONS, idle=True)
        while not self._leaving.is_set():
            try:
                steps = group.all_gather(np.array([self._step()]))
                if self._part(group, int(steps.argmax()) if steps.max() > SERVER else None):
                    return True
            except cd.errors.CollectiveError as error:
                if not error.rejoin or self._leaving.is_set():
                    raise
                print(f"one generation less: {error}", flush=True)
            group.rejoin()
        return False


def room(group: cd.Group) -> bool:
    """Whether a waiting rank can be let in: the same on all members after the same collective."""
    return group.waiting > 0 and group.size < MOST


# The training job


def train(ending: threading.Event) -> None:
    """Train each rank on its rows. Rank 0 has a thread that pushes the newest weights."""
    model = Model()
    with cd.connect() as session, session.join(options=OPTIONS) as group:
        pushing = threading.Thread(target=push, args=(model, ending))
        if group.rank == 0:
            pushing.start()
        inputs, answers = (array[group.rank :: group.size] for array in load(seed=0))
        over = 0
        while not over:
            step, weights = model.now
            errors = inputs @ weights - answers
            gradient, over = group.all_reduce("sum", (2 / ROWS * inputs.T @ errors, int(ending.is_set())))
            model.now = step + 1, weights - LEARNING_RATE * gradient
            time.sleep(STEP_SECONDS)
    ending.set()
    if pushing.ident:
        pushing.join()
    print(f"trained to {model}", flush=True)


def push(model: Model, ending: threading.Event) -> None:
    def part(group: cd.Group, root: int | None) -> bool:
        while not room(group):
            over = ending.wait(PUSH_EVERY)
            step, weights = model.now
            group.broadcast((step, weights, over), root=root or 0)
            print(f"pushed to {group.size - 1}: {Model((step, weights))}", flush=True)
            if over:
                group.barrier()  # all have received: a sender may end before that
                return True
        return False

    member = Membership(lambda: model.now[0], part)
    member.start()
    ending.wait()
    member.join(LAST_PUSH)
    member.leave()


# The serving job


def serve(ending: threading.Event) -> None:
    """Answers requests all the time, with the newest weights that have come."""
    model, (inputs, answers) = Model(), load(seed=1)
    member = Membership(lambda: SERVER, partial(receive, model))
    member.start()
    served, told = 0, 0
    while not ending.wait(0.02):
        step, weights = model.now
        loss = float(np.mean((inputs[served % ROWS] @ weights - answers[served % ROWS]) ** 2))
        served += 1
        if step > told:
            told = step
            loss = float(np.mean((inputs @ weights - answers) ** 2))
            print(f"serves {Model((step, weights))}, loss {loss:.6f}, after {served} answers", flush=True)
    member.leave()
    print(f"ended after {served} answers", flush=True)


def receive(model: Model, group: cd.Group, root: int | None) -> bool:
    while not room(group):
        if root is None:  # servers among themselves: look now and then whether a trainer wants to come in
            time.sleep(PUSH_EVERY / 4)
            group.barrier()
        else:
            step, weights, over = group.broadcast(None, root=root)
            model.now = step, weights
            if over:  # the trainer leaves after this
                group.barrier()
    return False


def main() -> None:
    roles = {"train": train, "serve": serve}
    if len(sys.argv) != 2 or sys.argv[1] not in roles:
        sys.exit(f"usage: push_weights.py {'|'.join(roles)}")
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    roles[sys.argv[1]](ending)


if __name__ == "__main__":
    main()
