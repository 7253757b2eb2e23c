value = np.arange(5) + group.rank
print(group.reduce_scatter("sum", value))  # [1 3 5]
print(group.reduce_scatter("sum", value, sizes=[1, 4]))  # [1]

mine = np.zeros(3 - group.rank, int)
group.reduce_scatter("sum", value, out=mine)  # allocates nothing
