import numpy as np

import collectived as tf

value = tf.PerReplica([np.array([1, 2]), np.array([3, 4])])
print(tf.distribute.ReductionToOneDevice().reduce("mean", value, "CPU:0"))  # [2. 3.]

largest = tf.distribute.ReductionToOneDevice(accumulation_fn=lambda parts: np.maximum(*parts))
print(largest.reduce("sum", value, "CPU:0"))  # [3 4]
