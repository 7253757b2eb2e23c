"""Records of past collectives: flight recorder, counters, rates."""
