losses = cd.PerReplica([0.5, 1.5])
total = cd.HierarchicalCopyAllReduce(session=session).reduce("sum", losses, destinations=losses)
print(type(total).__name__, total.values)  # Mirrored (2.0, 2.0)
