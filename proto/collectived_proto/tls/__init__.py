"""TLS: certificate files, the settings for calls, and the reasons of calls that failed."""
