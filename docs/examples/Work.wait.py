work = group.barrier(async_op=True)
print(work.wait())  # None
