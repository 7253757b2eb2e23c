total = group.reduce("sum", np.array([1, group.rank]), root=0)
print(total)  # [2 1]
assert (total is None) == (group.rank != 0)
