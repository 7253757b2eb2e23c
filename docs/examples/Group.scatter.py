everything = np.arange(5) if group.rank == 0 else None  # only the root's value is looked at
print(group.scatter(everything))  # [0 1 2]
print(group.scatter(everything, sizes=[1, 4] if group.rank == 0 else None))  # [0]
