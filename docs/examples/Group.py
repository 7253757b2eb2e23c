with session.join("workers", 2, rank=group.rank) as workers:
    print(f"rank {workers.rank} of {workers.size}, {workers.local_rank} of {workers.local_size} here")
    # rank 0 of 2, 0 of 1 here
    print(workers.all_reduce("sum", {"loss": 0.5, "seen": np.array([1, 2])}))  # {'loss': 1.0, 'seen': array([2, 4])}
