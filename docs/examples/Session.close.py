session.close()  # leaves the group, too
try:
    session.join("again", 2)
except cd.errors.FailedPreconditionError as error:
    print(error)  # the session with worker 0 is closed; connect again
