"""One call, whichever way it goes to its worker; `route.py` is the seam to the ways."""
