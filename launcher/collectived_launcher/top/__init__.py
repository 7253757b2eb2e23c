"""`collectived top`: the running job, live in the terminal."""
