"""The libraries that are measured: `start()` of each joins its group and returns a `benchmarks.trial.Peer`."""

OWNED = "session.empty"
ORDINARY = "ordinary arrays"
