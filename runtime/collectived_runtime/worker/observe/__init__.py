"""What a worker shows of itself: status, trace, metrics, spans."""
