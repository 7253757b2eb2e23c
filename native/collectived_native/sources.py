"""The sources of the core as one digest, by which a core says of which sources it was built."""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent / "src"


def list_sources() -> list[Path]:
    """Return all files of the core's source, in the order in which they are compiled; none where only a wheel is."""
    return sorted(FOLDER.glob("*.[ch]"))


def digest_sources() -> str:
    """Return the digest of names and contents of all source files."""
    digest = hashlib.sha256()
    for path in list_sources():
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:32]
