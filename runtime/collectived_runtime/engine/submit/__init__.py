"""Pure: which rank has submitted what, and whether it is valid and agrees."""
