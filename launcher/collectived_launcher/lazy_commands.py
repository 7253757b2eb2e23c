"""The commands by name, each loaded when it is asked for: of what one needs, most others need little."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module

import click


class LazyCommands(MutableMapping[str, click.Command]):
    """
    Args:
        where: for each verb the module, below this package, that has a command of that name.
    """

    def __init__(self, where: Mapping[str, str]) -> None:
        self._modules = dict(where)
        self._loaded: dict[str, click.Command] = {}

    def __getitem__(self, verb: str) -> click.Command:
        if verb not in self._loaded:
            self[verb] = getattr(import_module(f"{__package__}.{self._modules[verb]}"), verb)
        return self._loaded[verb]

    def __setitem__(self, verb: str, command: click.Command) -> None:
        self._loaded[verb] = command
        self._modules.setdefault(verb, "")

    def __delitem__(self, verb: str) -> None:
        del self._modules[verb]
        self._loaded.pop(verb, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)
