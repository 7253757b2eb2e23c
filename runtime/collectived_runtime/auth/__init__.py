"""Authentication of the callers of a daemon, and their permissions."""
