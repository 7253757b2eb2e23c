"""One parser under atheris, in a process of its own: python -m tests.fuzz.guided NUMBER [LIBFUZZER'S OPTIONS] CORPUS"""

from __future__ import annotations

import sys
from typing import Any

import atheris

with atheris.instrument_imports(include=["collectived_proto", "collectived_runtime", "collectived"]):
    from tests.fuzz.parsers import PARSERS, Parser


def main() -> None:
    parser: Parser = PARSERS[int(sys.argv[1])]

    def feed(data: bytes) -> None:
        try:
            parser.read(data)
        except parser.refuses:
            return

    setup: Any = atheris.Setup
    setup([sys.argv[0], *sys.argv[2:]], feed)
    fuzz: Any = atheris.Fuzz
    fuzz()


if __name__ == "__main__":
    main()
