"""The notebook runs from top to bottom, in a kernel of its own, as a new user would run it."""

import importlib.util
import shutil
import unittest.mock
from pathlib import Path

import nbclient
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from dllm_jax.demo import trains

NOTEBOOK = Path(__file__).parent.parent / "examples/quickstart.ipynb"


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    book = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") for cell in book.cells), "it is kept without outputs"
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in code]
    results = [out.data for cell in code for out in cell.outputs if "data" in out]
    assert any(trains.ANSWER in data.get("text/plain", "") for data in results), "the question is answered"
    assert any("image/png" in data for data in results), "the picture is drawn"
    assert any("DualCache" in text and "positions computed" in text for text in printed)


@pytest.mark.parametrize(("gpu", "wanted"), [(None, ""), ("/usr/bin/nvidia-smi", " jax[cuda12]")])
def test_the_first_cell_installs_what_is_missing_and_what_a_gpu_needs(monkeypatch, gpu, wanted):
    """Where the package is there, as in the other test, it does nothing."""
    first = next(cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: gpu)
    shell = unittest.mock.Mock()
    namespace = {"get_ipython": lambda: shell}
    exec(TransformerManager().transform_cell(first.source), namespace)
    shell.run_line_magic.assert_called_once_with("pip", "install --quiet {wanted}")
    assert namespace["wanted"] == f"git+https://github.com/dllm-jax/dllm_jax{wanted}"
