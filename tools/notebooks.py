"""Executes notebooks in their own folder.

    python -m tools.notebooks examples/notebooks/library.ipynb    executes it and keeps the outputs

What differs from run to run is removed from the outputs: times, progress bars and warnings.
"""

import argparse
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

TIMEOUT = 600
"""Longest time of a cell, in seconds."""


def executed(path: Path, replaced: dict[str, str] | None = None) -> Any:
    """Executes a notebook and returns it with its outputs.

    Args:
        path: The notebook. Its folder is the working directory.
        replaced: Texts of code cells to replace before the execution, for a shorter run.

    Raises:
        CellExecutionError: A cell raises an error.
        ValueError: A text to replace is in no cell.
    """
    notebook = nbformat.read(path, as_version=4)
    for old, new in (replaced or {}).items():
        cells = [cell for cell in notebook.cells if old in cell.source]
        if not cells:
            raise ValueError(f"{path} has no cell with {old!r}")
        for cell in cells:
            cell.source = cell.source.replace(old, new)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=TIMEOUT, kernel_name="python3", resources=resources).execute()
    return notebook


def clean(notebook: Any) -> None:
    """Removes what differs between runs of the same results: times, progress bars, warnings."""
    notebook.metadata = {
        "kernelspec": notebook.metadata.kernelspec,
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if not _is_transient(output)]
        for output in cell.outputs:
            # beside a picture or a frame it only has the object's address in memory
            if len(output.get("data", {})) > 1:
                output.data.pop("text/plain", None)


def _is_transient(output: Any) -> bool:
    """Whether an output is a warning or a progress bar."""
    html = output.get("data", {}).get("text/html", "")
    return output.get("name") == "stderr" or "<progress" in html


def main() -> None:
    """Executes the notebooks of the command line and writes them with their outputs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", type=Path, nargs="+")
    for path in parser.parse_args().notebooks:
        notebook = executed(path)
        clean(notebook)
        nbformat.write(notebook, path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
