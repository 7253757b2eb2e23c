"""TLS: what files hold, how somebody is dialled with it, and why that failed."""
