"""What passes between a client and the worker of its own host beside gRPC: doorbell messages and shared memory."""
