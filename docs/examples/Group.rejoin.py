group.barrier()
try:
    if group.rank == 1:
        group.abort("out of data")
    group.barrier()
except cd.errors.AbortedError as error:
    print(error.rejoin)  # True
    group.rejoin(timeout=10)  # all ranks that want to go on
print(group.all_reduce("sum", 1))  # 2
