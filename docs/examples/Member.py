other = group.members[1]
print(other.rank, other.worker, other.device)  # 1 1 /job:worker/replica:0/task:1/device:CPU:0
