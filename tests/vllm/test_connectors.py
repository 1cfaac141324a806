"""The identity of what an engine serves, without vLLM."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aurakv.errors import FileError
from aurakv.vllm.connectors import identity


def served(folder: Path, load_format: str = "dummy", dtype: str = "bfloat16", ranks: int = 1, **overrides: Any) -> Any:
    model = SimpleNamespace(model=str(folder), hf_overrides=overrides, dtype=dtype, quantization=None)
    parallel = SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1)
    return SimpleNamespace(
        model_config=model, parallel_config=parallel, load_config=SimpleNamespace(load_format=load_format)
    )


def test_random_weights_have_an_identity(tmp_path: Path) -> None:
    """vLLM draws the same ones at every start: their calibration is kept. Without files other weights have none."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    known = identity(served(tmp_path))
    assert identity(served(tmp_path)) == known
    others = {
        identity(served(tmp_path, dtype="float32")),
        identity(served(tmp_path, ranks=2)),
        identity(served(tmp_path, num_hidden_layers=3)),
    }
    assert len(others | {known}) == 4
    with pytest.raises(FileError, match="has no weights"):
        identity(served(tmp_path, "auto"))
