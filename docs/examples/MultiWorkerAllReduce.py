import numpy as np

import collectived as tf

workers = ["/job:worker/replica:0/task:0", "/job:worker/replica:0/task:1"]
ops = tf.contrib.distribute.MultiWorkerAllReduce(
    workers,
    1,
    all_reduce_spec=[("pscpu/pscpu", 2, 1024), ("xring", 2, -1)],  # up to 1024 bytes, then all else
)
value = tf.PerReplica([np.ones(1000), np.ones(1000)], [f"{worker}/device:CPU:0" for worker in workers])
if tf.distribute.get_replica_context().replica_id_in_sync_group == 0:  # one client drives the devices of all
    total = ops.reduce(tf.distribute.ReduceOp.SUM, value, destinations=value)
    print(total.devices[1], total.values[1][:3])  # /job:worker/replica:0/task:1/device:CPU:0 [2. 2. 2.]
