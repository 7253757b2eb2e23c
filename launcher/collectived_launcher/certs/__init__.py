"""`collectived certs`: a private certificate authority for the hosts and people of a cluster."""
