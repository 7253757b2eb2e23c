losses = cd.PerReplica([0.5, 1.5], devices=["CPU:2", "CPU:3"])
print(losses.values, losses.devices)  # (0.5, 1.5) ('CPU:2', 'CPU:3')

mean = cd.ReductionToOneDevice(session=session).reduce("mean", losses, destinations="CPU:0")
print(mean)  # 1.0
