small = session.join("small", 2, rank=group.rank)
small.barrier()
small.leave()
try:
    small.barrier()
except cd.errors.FailedPreconditionError as error:
    print(error)  # rank 0 has left group 'small'; join it again
