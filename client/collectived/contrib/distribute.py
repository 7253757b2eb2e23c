"""The names of tf.contrib.distribute."""

from collectived.cross_device.all_reduce import MultiWorkerAllReduce

__all__ = ["MultiWorkerAllReduce"]
