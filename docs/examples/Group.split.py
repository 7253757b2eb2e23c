part = group.split(color=group.rank % 2, key=0)  # even ranks, odd ranks
print(part.rank, part.size)  # 0 1

pair = group.split(color=0, key=-group.rank)  # all of them, in reverse order
print(pair.rank, pair.size)  # 1 2

alone = group.split(color=0 if group.rank == 1 else None)
print(alone)  # None
