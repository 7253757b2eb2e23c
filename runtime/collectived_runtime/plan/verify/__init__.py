"""Proof that a plan does what its operation promises."""
