"""`collectived drain`: lets what runs finish, and refuses what is new."""
