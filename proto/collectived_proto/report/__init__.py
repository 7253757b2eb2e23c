"""What is said of status in the same words everywhere."""
