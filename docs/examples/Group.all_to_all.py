mine = np.array([10, 20]) + group.rank  # row r goes to rank r
print(group.all_to_all(mine))  # [10 11]

rows = [3, 1] if group.rank == 0 else [0, 2]  # how many of my rows go to each rank
print(group.all_to_all(np.arange(sum(rows)), sizes=rows))  # [0 1 2]
