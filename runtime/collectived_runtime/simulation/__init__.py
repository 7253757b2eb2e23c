"""`collectived simulate`: what a collective would cost on hosts that are not there, from the plans that would run.

To read it, begin with `study` (a question, its figures) and `algorithms` (names to plans); `cli` is the shell
around both. May import `plan`, and of the coordinator only what AUTO chooses from.
"""
