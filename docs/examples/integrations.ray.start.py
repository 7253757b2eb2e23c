import ray

import collectived as cd

ray.init()
with cd.integrations.ray.start(ranks_per_node=2) as job:
    sums = job.run(lambda group: group.all_reduce("sum", group.rank), timeout=60)
print(sums == [sum(range(job.size))] * job.size)  # True
