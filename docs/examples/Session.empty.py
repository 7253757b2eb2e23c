gradients = session.empty((200_000, 10), np.float32)
gradients[:] = group.rank
total = group.all_reduce("sum", gradients)  # nothing is copied in
print(total[0, :3], "writable:", total.flags.writeable)  # [1. 1. 1.] writable: False

part = group.all_reduce("sum", gradients[:5])  # a slice of it is worker memory, too
mine = total.copy()  # to be written
