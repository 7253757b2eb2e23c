"""Fits a linear model as an elastic job: ranks may die and others may come, and the training goes on.

    collectived launch --clients 3 --max-restarts 9 -- python examples/elastic.py

While it runs, kill a rank, or start one more from another shell: `python examples/elastic.py`. A killed rank is gone
from the next generation. A new rank is let in and gets the weights of the rank that is furthest. SIGTERM to any rank
ends the job in good order: all stop after the same step. Each rank prints a line per generation. See
docs/guide/recovery.md.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # read when NumPy is imported: ranks share the cores

import contextlib
import hashlib
import signal
import sys
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import collectived as cd

FEWEST, MOST, SETTLE = 1, 4, 0.5  # ranks; seconds to wait for more of them
STEPS = int(sys.argv[1]) if sys.argv[1:] else 50_000
ROWS, COLUMNS, LEARNING_RATE = 4096, 64, 2e-4
OPTIONS = cd.CommunicationOptions(timeout_seconds=30)  # a rank that is stuck for longer is left behind

Array = NDArray[np.float64]


@dataclass
class Model:
    """The state of the training. A rank that starts makes a new one, and gets that of the rank that is furthest."""

    step: int = 0
    weights: Array = field(default_factory=lambda: np.zeros(COLUMNS))


def load() -> tuple[Array, Array]:
    """Inputs and targets, the same on every rank."""
    draw = np.random.default_rng(1)
    inputs = draw.standard_normal((ROWS, COLUMNS))
    return inputs, inputs @ draw.standard_normal(COLUMNS) + 0.1 * draw.standard_normal(ROWS)


def mean_loss(weights: Array, data: tuple[Array, Array]) -> float:
    inputs, targets = data
    return float(np.mean((inputs @ weights - targets) ** 2))


def line_up(group: cd.Group, model: Model) -> None:
    """Give every rank the step and the weights of the rank that is furthest."""
    steps = group.all_gather(np.array([model.step]))
    model.step, model.weights = group.broadcast((model.step, model.weights), root=int(steps.argmax()))


def train(group: cd.Group, model: Model, data: tuple[Array, Array], ending: threading.Event) -> bool:
    """Train to the end, or until a waiting rank can be let in. Return whether it was to the end.

    Sums over all rows are divided by their number, so it does not matter how many ranks share them.
    """
    inputs, targets = (array[group.rank :: group.size] for array in data)
    over = model.step >= STEPS
    while not over and not (group.waiting and group.size < MOST):  # the same on all ranks
        errors = inputs @ model.weights - targets
        gradient, ending_ranks = group.all_reduce("sum", (2 / ROWS * inputs.T @ errors, int(ending.is_set())))
        model.weights -= LEARNING_RATE * gradient
        model.step += 1
        over = model.step >= STEPS or ending_ranks > 0
    return over


def take_part(session: cd.Session, model: Model, data: tuple[Array, Array], ending: threading.Event) -> None:
    """One generation of the group after the other, until the training is over."""
    group = session.join("/elastic", (FEWEST, MOST), settle=SETTLE, options=OPTIONS)
    while True:
        try:
            line_up(group, model)
            loss = mean_loss(model.weights, data)
            print(f"rank {group.rank} of {group.size} from step {model.step}: loss {loss:.6f}", flush=True)
            if train(group, model, data, ending):
                return
        except cd.errors.CollectiveError as error:
            print(f"after step {model.step}: {error}", flush=True)
            if not error.rejoin:  # the ranks differ, which is a mistake, or this rank's worker is lost
                raise
        group.rejoin()


def main() -> None:
    model, data, ending = Model(), load(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    over = False
    while not over:
        with cd.connect(timeout=60) as session, contextlib.suppress(cd.errors.UnavailableError):  # our worker is lost
            take_part(session, model, data, ending)
            over = True
    digest = hashlib.sha256(model.weights.tobytes()).hexdigest()[:16]
    print(f"ended after step {model.step}: loss {mean_loss(model.weights, data):.6f}, weights {digest}", flush=True)


if __name__ == "__main__":
    main()
