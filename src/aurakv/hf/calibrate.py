"""calibrate: what the keys of a model teach, from a text that it reads in transformers."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from ..calibration.calibration import Calibration
from ..calibration.policy import FIRST
from ..calibration.statistics import ENOUGH, SINKS
from ..errors import InputError
from .observe import observe
from .progress import Progress


def calibrate(
    model: PreTrainedModel,
    ids: Tensor,
    source: str = "",
    identity: str = "",
    progress: Progress | None = None,
) -> Calibration:
    """From the token ids [1, n] of a text; `progress` is told how many more were read."""
    if ids.shape[1] < ENOUGH + SINKS:
        raise InputError(f"a model is calibrated on at least {ENOUGH + SINKS} tokens, got {ids.shape[1]}")
    seen = observe(model, ids, progress=progress)
    layers = {number: layer.calibration(FIRST, model.device.type) for number, layer in seen.items()}
    return Calibration(layers, source, FIRST, identity)
