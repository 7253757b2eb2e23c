"""`collectived trace`: what happened on all workers, as a file for a trace viewer."""
