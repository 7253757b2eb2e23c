mine = np.full((group.rank + 1, 2), group.rank)  # ranks may have different numbers of rows
print(group.all_gather(mine).tolist())  # [[0, 0], [1, 1], [1, 1]]

print(group.all_gather(np.array([[group.rank]]), axis=1))  # [[0 1]]
