work = group.all_reduce("sum", {"x": np.ones(2)}, async_op=True)
print(work.result(timeout=10))  # {'x': array([2., 2.])}
print(work.result() is work.result())  # True
