"""The names of tf.contrib.distribute."""

from collectived.cross_device.multi_worker import MultiWorkerAllReduce

__all__ = ["MultiWorkerAllReduce"]
