import collectived as cd

with cd.testing.local() as job:
    with job.connect() as session:
        print(session.worker)  # /job:worker/task:0
    print(job.run(lambda group: group.rank, ranks=3))  # [0, 1, 2]
