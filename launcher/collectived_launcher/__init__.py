"""The `collectived` command: starts the daemons and the clients of a job, watches over them, and shows what they do.

It knows the daemons by their command line alone and imports neither them nor the client library. To read it, begin with
`launch.job` (what is to run), `launch.job_state` (what to do when something ends) and `launch.run` (what does it).
"""
