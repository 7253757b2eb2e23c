"""Keys: a settings class is a frozen dataclass whose fields are made by `key`, and that is their only declaration.

A key `memory_limit` of the worker is `memory_limit` in the table `[worker]` of the file,
`COLLECTIVED_WORKER_MEMORY_LIMIT` in the environment, and `--memory-limit` on the command line.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from collectived_proto.configuration.kinds import Kind

_MARK = "collectived"
PREFIX = "COLLECTIVED_"


class Required:
    """Stands for the default of a key that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = Required()


@dataclass(frozen=True, slots=True)
class Key:
    """One thing that a daemon can be told.

    table: of the file, "" for keys that both daemons have. flags: of the command line, () where it must not stand
    there. in_file: whether the file may have it. hidden: a secret, which is never shown. alone: what its flag means
    where no value follows it; None where one must.
    """

    name: str
    kind: Kind
    default: Any
    sentence: str
    table: str
    variable: str
    flags: tuple[str, ...]
    in_file: bool = True
    hidden: bool = False
    alone: str | None = None

    @property
    def path(self) -> str:
        """As messages name it: `worker.memory_limit`, or `job` where both daemons have it."""
        return f"{self.table}.{self.name}" if self.table else self.name


def key(
    kind: Kind,
    default: Any,
    sentence: str,
    *,
    variable: str = "",
    also: tuple[str, ...] = (),
    hidden: bool = False,
    alone: str | None = None,
) -> Any:
    """A field of a settings class.

    Args:
        default: its value where nobody gives one; `REQUIRED` for none.
        variable: of the environment, where it is not named after the key.
        also: further spellings of its flag.
        hidden: a secret: neither in the file nor on a command line, where others could read it, and never shown.
        alone: the value that its flag means where none follows it.
    """
    told = {"kind": kind, "default": default, "sentence": sentence, "variable": variable, "also": also}
    given = {} if default is REQUIRED else {"default": default}
    return dataclasses.field(**given, repr=not hidden, metadata={_MARK: {**told, "hidden": hidden, "alone": alone}})


def keys_of(settings: type[Any]) -> tuple[Key, ...]:
    """The keys of a settings class, in order; those of its base class belong to both daemons."""
    shared = {name for base in settings.__mro__[1:] for name in getattr(base, "__annotations__", {})}
    return tuple(
        _key(field.name, "" if field.name in shared else settings.TABLE, field.metadata[_MARK])
        for field in dataclasses.fields(settings)
    )


def _key(name: str, table: str, told: dict[str, Any]) -> Key:
    scope = f"{table}_" if table else ""
    return Key(
        name,
        told["kind"],
        told["default"],
        told["sentence"],
        table,
        told["variable"] or f"{PREFIX}{scope}{name}".upper(),
        () if told["hidden"] else (f"--{name.replace('_', '-')}", *told["also"]),
        in_file=not told["hidden"],
        hidden=told["hidden"],
        alone=told["alone"],
    )
