import collectived as cd

with cd.testing.local(workers=2) as job:
    print(job.run(lambda group: group.all_reduce("mean", float(group.rank)), ranks=4))  # [1.5, 1.5, 1.5, 1.5]
