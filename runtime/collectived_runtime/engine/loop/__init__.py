"""The thread of one group: its one wait, and the life of an instance."""
