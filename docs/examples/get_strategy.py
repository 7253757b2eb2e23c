import collectived as tf

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    print(tf.distribute.get_strategy() is strategy)  # True
print(type(tf.distribute.get_strategy()).__name__)  # MultiWorkerMirroredStrategy
