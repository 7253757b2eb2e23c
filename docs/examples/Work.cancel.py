work = group.recv(tag=3, async_op=True)  # no rank sends under this tag
print(work.cancel())  # True
try:
    work.result()
except cd.errors.CancelledError as error:
    print(error.rejoin)  # False
group.barrier()
