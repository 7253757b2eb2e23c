loss = group.all_reduce("mean", float("nan") if group.rank == 1 else 0.5)
try:
    if group.rank == 1:
        group.abort(f"loss is {loss}")
    group.barrier()
except cd.errors.AbortedError as error:
    assert "loss is nan" in str(error)  # on every rank
    print(error.rejoin)  # True
