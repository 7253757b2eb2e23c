"""Finding a worker and asking it: addresses, RPCs, joins, the environment, the end of the process."""
