"""`collectived config`: what the daemons are told, and where each value came from."""
