gradients = {"w": np.full((2, 3), group.rank + 1.0, np.float32), "b": [np.arange(3), None]}
total = group.all_reduce("sum", gradients)
print(total["w"].tolist(), total["b"][0], total["b"][1])  # [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]] [0 2 4] None

options = cd.CommunicationOptions(timeout_seconds=30)
print(group.all_reduce("mean", group.rank, options))  # 0.5

weights = np.array([1.0, group.rank])
group.all_reduce("max", weights, out=weights)  # in place
print(weights)  # [1. 1.]

try:
    group.all_reduce(weights, "sum")
except TypeError as error:
    assert "the reduce op comes first" in str(error)
