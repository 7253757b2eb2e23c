"""One call, whichever way it goes to its worker; `channel.py` is the seam to the ways."""
