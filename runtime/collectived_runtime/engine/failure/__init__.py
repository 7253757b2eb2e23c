"""Fault reports, and the decision of workers without an answer of the coordinator."""
