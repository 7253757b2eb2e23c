import numpy as np

import collectived as tf

ops = tf.distribute.HierarchicalCopyAllReduce(num_packs=1)
value = tf.PerReplica([np.arange(2) + replica for replica in range(3)])  # any number of devices
total = ops.reduce(tf.distribute.ReduceOp.SUM, value, destinations=value)
print(total.devices[2], total.values[2])  # /job:worker/replica:0/task:0/device:CPU:2 [3 6]
