"""`collectived bench`: runs the measurement of the client library as ranks, and shows its figures."""
