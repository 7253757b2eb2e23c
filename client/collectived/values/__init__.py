"""What a value is, seen without any worker: nests, leaves, sparse values, axes, and where results go."""
