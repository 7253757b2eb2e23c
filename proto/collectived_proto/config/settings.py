"""Keys: a settings class is a frozen dataclass whose fields are made by `setting`, and that is their only declaration.

A key `memory_limit` of the worker is `memory_limit` in the table `[worker]` of the file,
`COLLECTIVED_WORKER_MEMORY_LIMIT` in the environment, and `--memory-limit` on the command line.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from collectived_proto.config.value_types import ValueType

_METADATA_KEY = "collectived"
VARIABLE_PREFIX = "COLLECTIVED_"


class Required:
    """Stands for the default of a key that has none."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = Required()


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration key of a daemon.

    table: of the file, "" for keys that both daemons have. flags: of the command line, () where it must not stand
    there. allowed_in_file: whether the file may have it. is_secret: a secret, which is never shown. const: what its
    flag means where no value follows it; None where one must.
    """

    name: str
    value_type: ValueType
    default: Any
    description: str
    table: str
    variable: str
    flags: tuple[str, ...]
    allowed_in_file: bool = True
    is_secret: bool = False
    const: str | None = None

    @property
    def path(self) -> str:
        """As messages name it: `worker.memory_limit`, or `job` where both daemons have it."""
        return f"{self.table}.{self.name}" if self.table else self.name


def setting(
    kind: ValueType,
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
        default: its value where none is given; `REQUIRED` for none.
        variable: of the environment, where it is not named after the key.
        also: further spellings of its flag.
        hidden: a secret: neither in the file nor on a command line, where others could read it, and never shown.
        alone: the value that its flag means where none follows it.
    """
    told = {"kind": kind, "default": default, "sentence": sentence, "variable": variable, "also": also}
    given = {} if default is REQUIRED else {"default": default}
    return dataclasses.field(
        **given, repr=not hidden, metadata={_METADATA_KEY: {**told, "hidden": hidden, "alone": alone}}
    )


def list_settings(settings: type[Any]) -> tuple[Setting, ...]:
    """The keys of a settings class, in order; those of its base class belong to both daemons."""
    shared = {name for base in settings.__mro__[1:] for name in getattr(base, "__annotations__", {})}
    return tuple(
        _make_setting(field.name, "" if field.name in shared else settings.TABLE, field.metadata[_METADATA_KEY])
        for field in dataclasses.fields(settings)
    )


def _make_setting(name: str, table: str, told: dict[str, Any]) -> Setting:
    scope = f"{table}_" if table else ""
    return Setting(
        name,
        told["kind"],
        told["default"],
        told["sentence"],
        table,
        told["variable"] or f"{VARIABLE_PREFIX}{scope}{name}".upper(),
        () if told["hidden"] else (f"--{name.replace('_', '-')}", *told["also"]),
        allowed_in_file=not told["hidden"],
        is_secret=told["hidden"],
        const=told["alone"],
    )
