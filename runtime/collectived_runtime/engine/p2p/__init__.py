"""Send and receive between ranks, apart from the group's instances."""
