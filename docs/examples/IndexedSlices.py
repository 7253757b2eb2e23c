rows = np.full((2, 3), group.rank + 1.0)
gradient = cd.IndexedSlices(rows, indices=[0, 4], dense_shape=(1000, 3))
total = group.all_reduce("sum", gradient)  # the rows of all ranks, not the whole array
print(total.indices, total.values[:, 0])  # [0 4 0 4] [1. 1. 2. 2.]
print(total.coalesced().indices, total.coalesced().values[:, 0])  # [0 4] [3. 3.]
print(total.to_dense().shape)  # (1000, 3)
