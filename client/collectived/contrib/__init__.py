"""The names of tf.contrib."""

from collectived.contrib import distribute

__all__ = ["distribute"]
