"""The way to a worker of this host: a doorbell and shared memory."""
