import numpy as np

import collectived as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def step(batch):
    context = tf.distribute.get_replica_context()
    return context.all_reduce("mean", batch.sum()), context.replica_id_in_sync_group


batches = tf.PerReplica([np.arange(3.0), np.arange(5.0)])
mean, replica = strategy.run(step, args=(batches,))
print([float(one) for one in mean.values], replica.values)  # [6.5, 6.5] (0, 1)
print(strategy.reduce("sum", replica))  # 1
