"""Limits that keep one client from harming the others: count, slow down, or refuse and name the key."""
