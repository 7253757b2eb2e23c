"""`collectived doctor`: looks at this host, at others and at what runs, and says what is wrong and what to do."""
