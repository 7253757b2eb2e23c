import collectived as tf

print(tf.distribute.NcclAllReduce is tf.NcclAllReduce)  # True
print(tf.distribute.experimental.CommunicationOptions is tf.CommunicationOptions)  # True
