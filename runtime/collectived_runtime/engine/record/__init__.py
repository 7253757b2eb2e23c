"""What has happened: flight recorder, counters, rates."""
