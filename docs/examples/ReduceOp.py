print(group.all_reduce(cd.ReduceOp.MEAN, np.array([1, 2], np.int8) + np.int8(group.rank)))  # [1.5 2.5]
print(group.all_reduce("Prod", 3), group.all_reduce("bor", group.rank))  # 9 1
print(cd.ReduceOp.of("average"))  # ReduceOp.MEAN
