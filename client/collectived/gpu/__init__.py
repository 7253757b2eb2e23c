"""GPUs as a client sees them: memory that its worker hands over, and arrays in it."""
