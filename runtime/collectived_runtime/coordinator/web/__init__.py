"""The coordinator's web page: the picture of `status` in a browser, read-only."""
