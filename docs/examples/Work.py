work = group.all_reduce("sum", np.arange(3), async_op=True)
# ... something else meanwhile
print(work.result())  # [0 2 4]
print(work.done(), work.exception())  # True None
