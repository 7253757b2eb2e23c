work = group.all_reduce("sum", 1, async_op=True)
work.wait()
print(work.done())  # True
