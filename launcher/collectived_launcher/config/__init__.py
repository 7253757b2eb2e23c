"""`collectived config`: the configuration of the daemons, and where each value came from."""
