"""Decisions about faults, the same whether the coordinator decides or a worker alone. Pure."""
