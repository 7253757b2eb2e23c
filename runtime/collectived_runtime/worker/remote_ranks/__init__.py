"""The way of clients without shared memory: every call is one `Submit`, rung as a doorbell would."""
