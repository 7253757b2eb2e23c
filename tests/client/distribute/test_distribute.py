"""The seeds' names, where their programs look for them."""

from __future__ import annotations

import importlib

import pytest

import collectived as tf


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "distribute",
            "ReduceOp CrossDeviceOps AllReduceCrossDeviceOps NcclAllReduce HierarchicalCopyAllReduce "
            "ReductionToOneDevice DistributedValues get_replica_context MirroredStrategy",
        ),
        (
            "distribute.experimental",
            "CommunicationOptions CommunicationImplementation CollectiveCommunication CollectiveHints",
        ),
        ("contrib.distribute", "MultiWorkerAllReduce"),
        ("errors", "DeadlineExceededError"),
    ],
)
def test_they_are_in_their_modules_and_the_same_at_top_level(module: str, names: str) -> None:
    imported = importlib.import_module(f"collectived.{module}")
    reached = tf
    for part in module.split("."):
        reached = getattr(reached, part)
    assert reached is imported
    for name in names.split():
        assert name in imported.__all__
        if module != "errors":
            assert getattr(imported, name) is getattr(tf, name), name


def test_the_old_name_of_the_implementation_is_the_same_object() -> None:
    assert tf.distribute.experimental.CollectiveCommunication is tf.CommunicationImplementation


def test_who_inherits_from_whom() -> None:
    assert issubclass(tf.NcclAllReduce, tf.AllReduceCrossDeviceOps)
    assert issubclass(tf.HierarchicalCopyAllReduce, tf.AllReduceCrossDeviceOps)
    assert issubclass(tf.MultiWorkerAllReduce, tf.AllReduceCrossDeviceOps)
    assert issubclass(tf.AllReduceCrossDeviceOps, tf.CrossDeviceOps)
    assert issubclass(tf.ReductionToOneDevice, tf.CrossDeviceOps)
    assert issubclass(tf.PerReplica, tf.DistributedValues) and issubclass(tf.Mirrored, tf.DistributedValues)
