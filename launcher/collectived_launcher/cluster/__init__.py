"""Daemons that stay: a cluster file, a supervisor on each host, `collectived up`, `down` and `run`."""
