"""What is measured, and against whom: `python -m benchmarks.compare`, `python -m benchmarks.coordinator_load`."""
