ring = cd.CommunicationOptions(implementation=cd.CommunicationImplementation.RING)
print(group.all_reduce("sum", 1, ring))  # 2
