"""The notebook runs from top to bottom, in a kernel of its own, as a new user would run it."""

from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).parent.parent / "examples/quickstart.ipynb"


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") for cell in book.cells), "it is kept without outputs"
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in code]
    results = [out.data for cell in code for out in cell.outputs if "data" in out]
    assert any("211" in data.get("text/plain", "") for data in results), "the question is answered"
    assert any("image/png" in data for data in results), "the picture is drawn"
    assert any("DualCache" in text and "positions computed" in text for text in printed)
