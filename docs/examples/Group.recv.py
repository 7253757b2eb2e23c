other = 1 - group.rank
sent = group.send(np.full(3, group.rank), to=other, async_op=True)
room = np.empty(3, np.int64)
got = group.recv(other, out=room)  # into memory of my own
sent.wait()
print(got is room, room)  # True [1 1 1]
