import sys

import collectived as cd

SUM = "import collectived as cd, sys; sys.exit(cd.connect().join().all_reduce('sum', 1))"


def body(group: cd.Group) -> None:
    if group.rank == 1:
        raise RuntimeError("loss is NaN")
    group.barrier()


with cd.testing.local(workers=2) as job:
    ended = job.run_program([sys.executable, "-c", SUM], ranks=4)
    print([one.returncode for one in ended])  # [4, 4, 4, 4]
    try:
        job.run(body)
    except RuntimeError as error:
        print(error)  # loss is NaN
