"""`collectived launch`: starts the daemons of a job and its clients, watches them, and takes all of it down."""
