import collectived as cd
import numpy as np

with cd.connect() as session, session.join() as group:
    mine = {"weights": np.full(3, group.rank, dtype=np.float32), "loss": float(group.rank)}
    options = cd.CommunicationOptions(timeout_seconds=10)
    mean = group.all_reduce("mean", mine, options=options)  # or "sum", "min", "max", …
    print(f"I am {group.rank} of {group.size}, the mean is {mean['weights']} and {mean['loss']}")
