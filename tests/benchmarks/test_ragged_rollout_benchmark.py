"""The benchmark of ragged rollouts runs, small, and its ways generate the same tokens."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ragged_rollout" / "run.py"


@pytest.mark.slow
def test_all_ways_generate_the_same_tokens(tmp_path: Path) -> None:
    target = tmp_path / "ragged.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--repeats=1", f"--json={target}"]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    result = json.loads(target.read_text())
    detail = result["detail"]
    assert detail["same_tokens"] == {"continuous": True, "static": True, "paged": True}
    assert result["tokens_per_s_over_static"] > 0
    assert 0 < result["padding_share"] < detail["padded_rows_padding_share"]
    assert result["kv_bytes_over_contiguous"] <= 0.25
    assert detail["temp_bytes"]["paged"] < detail["temp_bytes"]["continuous"]
    shares = detail["decode_padding_share"]
    assert shares["continuous"] < shares["static"]
