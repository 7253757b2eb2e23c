"""How processes are started on a host: this one, or another by ssh or Slurm."""
