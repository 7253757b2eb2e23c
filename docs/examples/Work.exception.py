work = group.all_reduce("sum", np.ones(2 + group.rank), async_op=True)  # shapes differ
print(type(work.exception()).__name__)  # InvalidArgumentError
