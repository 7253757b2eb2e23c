import collectived as cd

with cd.connect() as session:  # the worker that COLLECTIVED_WORKER names
    print(session.worker, "by", session.transport)  # /job:worker/task:0 by shared memory

try:
    cd.connect("unix:/nowhere.sock", timeout=1)
except cd.errors.UnavailableError as error:
    print(str(error).partition(":")[0])  # no worker answers at unix
