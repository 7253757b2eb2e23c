"""Many simulated workers for one coordinator."""
