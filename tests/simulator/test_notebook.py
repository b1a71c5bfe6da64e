"""colab/what_if.ipynb runs from end to end in a kernel of its own."""

import time
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "colab" / "what_if.ipynb"
LIMIT_S = 120.0


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat  # an extra of development
    from nbclient import NotebookClient

    root = NOTEBOOK.parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'kernels'}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    start = time.perf_counter()
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    took_s = time.perf_counter() - start
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    text = "".join(o.get("text", "") for o in outputs)
    assert "policy (simulated)" in text and "payback against dp_only" in text
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    assert took_s < LIMIT_S
