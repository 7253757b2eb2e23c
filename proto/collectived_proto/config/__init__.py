"""The configuration of the daemons. Each key is declared once, and is read from file < environment < flags."""
