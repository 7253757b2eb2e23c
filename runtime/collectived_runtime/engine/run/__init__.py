"""Where bytes move: schedules over links, folds of host memory."""
