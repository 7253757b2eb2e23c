gradients = {"first": np.ones(1000, np.float32), "last": np.ones(1000, np.float32)}
options = cd.CommunicationOptions(bytes_per_pack=1000)
work = group.all_reduce("sum", gradients, options, async_op=True)
seen = []
for path, gradient in work.as_completed():  # use one while the others travel
    assert gradient[0] == 2
    seen.append(path)
print(sorted(seen))  # [('first',), ('last',)]
