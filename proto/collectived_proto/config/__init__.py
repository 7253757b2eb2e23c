"""What the daemons can be told: each key is declared once, and read from file < environment < flags."""
