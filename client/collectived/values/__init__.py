"""The parts of a value, without any worker: nests, leaves, sparse values, axes, and where results go."""
