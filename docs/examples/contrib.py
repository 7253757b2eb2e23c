import collectived as tf

print(tf.contrib.distribute.MultiWorkerAllReduce is tf.MultiWorkerAllReduce)  # True
