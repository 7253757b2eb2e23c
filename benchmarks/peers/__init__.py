"""The libraries that are measured: `start()` of each joins its group and returns a `benchmarks.trial.Peer`."""

OWNED = "session.empty"
ORDINARY = "ordinary arrays"
COPY, FOLD = "copy", "fold"  # of the GPU alone; `fold 4` folds four ranks
TORCH, CUPY = "PyTorch", "CuPy"
