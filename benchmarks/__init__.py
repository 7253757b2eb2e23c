"""Measurements: `python -m benchmarks.compare`, `python -m benchmarks.coordinator_load`."""
