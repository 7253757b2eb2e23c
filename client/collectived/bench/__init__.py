"""The measuring client of `collectived bench`: one rank of it; see `__main__`. Nothing of the library imports it."""
