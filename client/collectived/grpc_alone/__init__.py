"""The way to a worker of any host: every call is one `Submit`."""
