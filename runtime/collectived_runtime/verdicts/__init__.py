"""What a fault comes to, the same whether the coordinator decides or a worker alone. Pure."""
