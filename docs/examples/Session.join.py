options = cd.CommunicationOptions(timeout_seconds=30)
with session.join("pair", 2, rank=group.rank, device="CPU:3", options=options, timeout=10) as pair:
    print(pair.rank, pair.size, pair.device)  # 0 2 /job:worker/replica:0/task:0/device:CPU:3
    print(pair.all_reduce("sum", 1))  # 2

try:
    session.join("three", 3, timeout=0.2)
except cd.errors.DeadlineExceededError as error:
    assert "three" in str(error)  # it names the ranks that were there
