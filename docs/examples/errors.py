try:
    group.all_reduce("sum", np.ones(3 + group.rank, np.float32))
except cd.errors.InvalidArgumentError as error:
    print(error)
    # rank 1 differs: the value is float32[4] there, float32[3] on rank 0 (all_reduce(sum) #0 of group 'world')
    #   rank 1 at errors.py:2: all_reduce(sum) of float32[4]
    #   rank 0 at errors.py:2: all_reduce(sum) of float32[3]
    print([member.rank for member in error.differing], error.op, error.rejoin)  # [1] all_reduce(sum) False

group.barrier()  # the group goes on
