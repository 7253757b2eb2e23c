value = cd.PerReplica([np.ones(2), np.zeros(2)])
print(isinstance(value, cd.DistributedValues), value.devices, value.primary)  # True ('CPU:0', 'CPU:1') [1. 1.]
