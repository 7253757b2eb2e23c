"""Pure: the coordinator's decisions as a step function of events and time."""
