weights = np.full((2, 2), group.rank, np.float32)  # a template off root: its structure, shapes and types must fit
weights = group.broadcast(weights, root=1)
print(weights.tolist())  # [[1.0, 1.0], [1.0, 1.0]]

config = {"rate": 0.1, "layers": [64, 10]} if group.rank == 1 else None  # off root, None takes what comes
config = group.broadcast(config, root=1)
print(float(config["rate"]), len(config["layers"]))  # 0.1 2
