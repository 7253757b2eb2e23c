"""The contract of collectived: what client, runtime and launcher say to each other, and nothing else."""
