print(session.worker, "by", session.transport)  # /job:worker/task:0 by shared memory
print(len(session.devices), session.devices[0])  # 8 /job:worker/replica:0/task:0/device:CPU:0
