"""What every package of the engine stands on: poller, topology, arenas."""
