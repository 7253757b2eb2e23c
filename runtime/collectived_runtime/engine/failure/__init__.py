"""Fault reports, and the decision of workers that hear no coordinator."""
