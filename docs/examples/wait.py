works = [group.all_reduce("sum", step, async_op=True) for step in range(3)]
print(cd.wait(works, timeout=10))  # [0, 2, 4]
