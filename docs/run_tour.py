"""Runs docs/tour.ipynb and saves it with what it put out: `make tour`. Nothing of the machine is saved with it."""

from pathlib import Path

import nbformat
from nbclient import NotebookClient

TOUR = Path(__file__).parent / "tour.ipynb"


def main() -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    NotebookClient(notebook, kernel_name="python3", record_timing=False, coalesce_streams=True).execute()
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, TOUR)


if __name__ == "__main__":
    main()
