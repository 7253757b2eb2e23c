"""Observation of a worker: status, trace, metrics, spans."""
