"""The ranks of this worker, their doorbells and their completions."""
