"""The `collectived` command: starts the daemons and the clients of a job, watches over them, and shows what they do.

It knows the daemons by their command line alone and imports neither them nor the client library. To read it, begin with
`job` (what is to run), `supervise` (what to do when something ends) and `run` (who does it).
"""
