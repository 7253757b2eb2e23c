losses = group.gather(np.array([0.5 + group.rank]), root=0)
print(losses)  # [0.5 1.5]
assert (losses is None) == (group.rank != 0)
