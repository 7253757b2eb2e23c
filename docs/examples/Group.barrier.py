group.barrier()
group.barrier(cd.CommunicationOptions(timeout_seconds=10))
