if group.rank == 0:
    group.send({"step": 7, "x": np.arange(3)}, to=1, tag=2)
    print(group.recv(source=1))  # [1.5 2.5]
else:
    got = group.recv(source=0, tag=2)
    assert got["step"] == 7 and got["x"].tolist() == [0, 1, 2]
    group.send(np.array([1.5, 2.5]), to=0)
