"""Communication between a client and the worker of its host beside gRPC: doorbell messages and shared memory."""
