"""Rules: each is a pure function from one part of the facts to findings."""
