"""What to think of facts: each judgement is a pure function from one part of them to findings."""
