"""The parts that every package of the engine uses: poller, topology, arenas."""
