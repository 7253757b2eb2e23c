"""Who calls a daemon, and what that lets them do."""
