"""Hostile input: what strangers may send to every parser and to living daemons. `make fuzz` is the long form."""
