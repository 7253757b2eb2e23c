ops = cd.AllReduceCrossDeviceOps("hierarchical_copy", num_packs=2, session=session)
value = cd.PerReplica([np.arange(3), np.arange(3)])
print(ops.reduce("sum", value, destinations=value).primary)  # [0 2 4]
