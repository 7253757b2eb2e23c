import numpy as np

import collectived as tf

ops = tf.distribute.NcclAllReduce(num_packs=1)
weights = tf.PerReplica([np.ones((2, 2)), np.ones((2, 2))])
losses = tf.PerReplica([np.float32(0.5), np.float32(1.5)])
total, mean_loss = ops.batch_reduce(tf.distribute.ReduceOp.SUM, [(weights, weights), (losses, losses)])
print(total.values[1].tolist(), mean_loss.primary)  # [[2.0, 2.0], [2.0, 2.0]] 2.0

print(ops.batch_reduce("sum", []))  # []
