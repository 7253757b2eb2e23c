import numpy as np

import collectived as tf

options = tf.distribute.experimental.CommunicationOptions(timeout_seconds=60)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def step(batch):
    context = tf.distribute.get_replica_context()
    gradient = batch.sum() * (context.replica_id_in_sync_group + 1)
    return context.all_reduce("mean", gradient), batch[:1]


mean, first = strategy.run(step, args=(np.arange(3.0),))
print(mean, strategy.num_replicas_in_sync)  # 4.5 2
print(strategy.reduce("sum", first), strategy.gather(first, axis=0))  # [0.] [0. 0.]
