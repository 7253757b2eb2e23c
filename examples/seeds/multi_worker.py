"""One client and the devices of all workers, as with r1.14; `import collectived as tf` is all that was changed:

    collectived launch --workers 2 --clients 1 -- python examples/seeds/multi_worker.py

Small tensors go by one algorithm, large ones by another, in two shards.
"""

import numpy as np

import collectived as tf

WORKERS = ["/job:worker/replica:0/task:0", "/job:worker/replica:0/task:1"]
DEVICES = [f"{worker}/device:CPU:{index}" for worker in WORKERS for index in range(2)]


def main() -> None:
    cross_device_ops = tf.contrib.distribute.MultiWorkerAllReduce(
        WORKERS, 2, all_reduce_spec=[("pscpu/pscpu", 2, 1024), ("xring", 2, -1)]
    )
    large = tf.PerReplica([np.full((256, 256), replica, np.float32) for replica in range(4)], DEVICES)
    small = tf.PerReplica([np.arange(3) + replica for replica in range(4)], DEVICES)
    summed = cross_device_ops.batch_reduce(tf.distribute.ReduceOp.SUM, [(large, large), (small, small)])
    for result in summed:
        print(
            f"{len(result.devices)} devices, each {result.primary.dtype}{list(result.primary.shape)}, "
            f"first {result.primary.ravel()[0]}, equal {all(np.array_equal(v, result.primary) for v in result.values)}"
        )
    mean = cross_device_ops.reduce(tf.distribute.ReduceOp.MEAN, small, destinations="/job:worker/task:1/cpu:0")
    print(f"the mean on one device: {mean}")


if __name__ == "__main__":
    if tf.distribute.get_replica_context().replica_id_in_sync_group == 0:  # one client drives them all
        main()
