"""The little HTTP of a daemon: pages to look at, for browsers, scrapers and probes."""
