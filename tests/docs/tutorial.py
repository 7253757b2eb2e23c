"""Run examples/tutorial.ipynb and store what its cells print: `python -m tests.docs.tutorial` (`make docs`).

A notebook that fails is not written. Another path as argument leaves the one in examples/ as it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from tests.docs.contents import ROOT
from traitlets.config import Config

NOTEBOOK = ROOT / "examples/tutorial.ipynb"
_CELL_TIMEOUT = 60  # seconds


def run_notebook(path: Path) -> Any:
    """Run all cells in a kernel of this environment, and return the notebook with their outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook: Any = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory(prefix="collectived-notebook-") as folder:
        settings = {name: folder for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
        commands = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | settings | {"PATH": commands, "JUPYTER_PLATFORM_DIRS": "1"}
        sockets = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        NotebookClient(
            notebook, config=sockets, timeout=_CELL_TIMEOUT, kernel_name="python3", record_timing=False
        ).execute(cwd=folder, env=environment)
    notebook.metadata.language_info = {"name": "python"}  # a kernel adds its own version, which says nothing here
    return notebook


def main() -> None:
    target = Path(sys.argv[1]) if sys.argv[1:] else NOTEBOOK
    nbformat.write(run_notebook(NOTEBOOK), target)


if __name__ == "__main__":
    main()
