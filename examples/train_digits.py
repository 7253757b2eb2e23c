"""Trains a small network on handwritten digits, data-parallel, with NumPy alone:

    collectived launch --workers 2 --clients 2 -- python examples/train_digits.py

Each rank computes gradients on its share of every batch; `all_reduce` makes them those of the whole batch. With
`--compression int8` they travel between hosts in fewer bytes, and error feedback gives back what that takes.
"""

import os

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read when NumPy is imported

import argparse
import copy
import hashlib
import subprocess
import sys
import time

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

import collectived as cd

STEPS, IMAGES_PER_RANK, LEARNING_RATE, HIDDEN = 400, 32, 0.3, 64
CHECKED_STEPS = 100  # after so many steps the weights are compared with those of a one-process run
OPTIONS = cd.CommunicationOptions(bytes_per_pack=16 << 10, timeout_seconds=60)

Array = NDArray[np.float32]
Labels = NDArray[np.int64]
Weights = dict[str, list[Array]]  # one nested structure: {"hidden": [matrix, bias], "output": [matrix, bias]}


def load() -> tuple[Array, Labels, Array, Labels]:
    """Training images and labels, test images and labels: the same split on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return images[360:], labels[360:], images[:360], labels[:360]


def new_weights(seed: int, size: int) -> Weights:
    """With `size` neurons in the hidden layer."""
    draw = np.random.default_rng(seed)

    def layer(inputs: int, outputs: int) -> list[Array]:
        scale = np.sqrt(2 / inputs)
        return [(scale * draw.standard_normal((inputs, outputs))).astype(np.float32), np.zeros(outputs, np.float32)]

    return {"hidden": layer(64, size), "output": layer(size, 10)}


def forward(weights: Weights, images: Array) -> tuple[Array, Array]:
    """Activations of the hidden layer, probabilities of the ten digits."""
    hidden = np.maximum(images @ weights["hidden"][0] + weights["hidden"][1], 0)
    scores = hidden @ weights["output"][0] + weights["output"][1]
    exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def gradients(weights: Weights, images: Array, labels: Labels) -> tuple[np.float32, Weights]:
    """The mean loss of these images and its gradient by every weight."""
    hidden, probabilities = forward(weights, images)
    rows = np.arange(len(labels))
    loss = -np.log(probabilities[rows, labels] + 1e-9).mean()
    probabilities[rows, labels] -= 1
    errors = probabilities / np.float32(len(labels))
    hidden_errors = (errors @ weights["output"][0].T) * (hidden > 0)
    return np.float32(loss), {
        "hidden": [images.T @ hidden_errors, hidden_errors.sum(axis=0)],
        "output": [hidden.T @ errors, errors.sum(axis=0)],
    }


def descend(weights: Weights, grads: Weights) -> None:
    """One step of gradient descent, in place."""
    for name, layer in weights.items():
        for weight, grad in zip(layer, grads[name], strict=True):
            weight -= np.float32(LEARNING_RATE) * grad


def flat(weights: Weights) -> Array:
    return np.concatenate([array.ravel() for layer in weights.values() for array in layer])


def batch(step: int, ranks: int, count: int) -> Labels:
    """Which of `count` images the whole job looks at in this step: one row per rank."""
    return np.random.default_rng([7, step]).integers(0, count, (ranks, IMAGES_PER_RANK))


def train(group: cd.Group, weights: Weights, images: Array, labels: Labels, compression: str) -> float:
    """Returns the seconds that the steps took."""
    start, options, seconds = copy.deepcopy(weights), OPTIONS, 0.0
    feedback = None
    if compression != "none":
        options = OPTIONS.merge(cd.CommunicationOptions(compression=compression))
        feedback = cd.ErrorFeedback(compression)
    for step in range(1, STEPS + 1):
        began = time.perf_counter()
        mine = batch(step, group.size, len(labels))[group.rank]
        loss, grads = gradients(weights, images[mine], labels[mine])
        if feedback is not None:
            grads = feedback.compensate(grads)
        loss, grads = group.all_reduce("mean", (loss, grads), options=options)
        descend(weights, grads)
        seconds += time.perf_counter() - began
        if group.rank == 0 and step % 100 == 0:
            print(f"step {step} of {STEPS}: loss {loss:.4f}")
        if group.rank == 0 and step == CHECKED_STEPS and feedback is None and len(weights["output"][0]) == HIDDEN:
            compare_with_one_process(start, weights, group.size, images, labels)
        if group.rank == 0 and step == STEPS // 2:
            subprocess.run([sys.executable, "-m", "collectived_launcher", "status", "--wide"], check=True)
    return seconds


def compare_with_one_process(start: Weights, weights: Weights, ranks: int, images: Array, labels: Labels) -> None:
    alone = copy.deepcopy(start)
    for step in range(1, CHECKED_STEPS + 1):
        chosen = batch(step, ranks, len(labels)).ravel()
        descend(alone, gradients(alone, images[chosen], labels[chosen])[1])
    distance = np.linalg.norm(flat(weights) - flat(alone)) / np.linalg.norm(flat(alone))
    print(f"after {CHECKED_STEPS} steps: {distance:.1e} of the weights' norm from a one-process run (at most 1e-5)")
    assert distance <= 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compression", choices=["none", "bfloat16", "float8", "int8"], default="none")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="neurons of the hidden layer (%(default)s)")
    arguments = parser.parse_args()
    images, labels, test_images, test_labels = load()
    with cd.connect() as session, session.join() as group:
        drawn = new_weights(seed=group.rank, size=arguments.hidden)
        weights = group.broadcast(drawn, options=OPTIONS)  # rank 0's, on every rank
        seconds = train(group, weights, images, labels, arguments.compression)
        digest = np.frombuffer(hashlib.sha256(flat(weights).tobytes()).digest(), np.uint8)
        same = np.array_equal(digest, group.broadcast(digest, options=OPTIONS))
        agreeing = group.all_reduce("sum", int(same), options=OPTIONS)
        accuracy = float((forward(weights, test_images)[1].argmax(axis=1) == test_labels).mean())
        if group.rank == 0:
            print(f"{STEPS} steps took {seconds:.2f} s")
            print(f"test accuracy {accuracy:.4f} (at least 0.93)")
            print(f"weights are the same bits on {agreeing} of {group.size} ranks")
        assert accuracy >= 0.93 and agreeing == group.size


if __name__ == "__main__":
    main()
