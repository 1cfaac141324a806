"""KV connectors of vLLM: which of them move blocks as bytes, and the name under which bytes outlive an engine.

vLLM finds stored blocks by the tokens in them, and knows neither format nor calibration. What is kept only as long as
an engine runs needs no name. What others may find, on disk, goes into a folder named after both.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..calibration.calibration import Calibration
from ..calibration.identity import identity_of
from ..calibration.policy import FITTED_ON
from ..errors import FileError, InputError
from .switch import Switch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PRIVATE = "SimpleCPUOffloadConnector"  # host memory of this engine
TIERED = "OffloadingConnector"  # the same, and further tiers behind it
SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")
DISK = "fs"  # the tier whose folder can be named
_PREFIX = "aurakv-"


def why_not(config: VllmConfig) -> str | None:
    """None, or why a connector cannot move blocks of codes, in one sentence."""
    transfer, cache = config.kv_transfer_config, config.cache_config
    if cache.kv_offloading_size is not None and cache.kv_offloading_backend != "native":
        return f"--kv-offloading-backend must be native, got {cache.kv_offloading_backend}"
    if transfer is None or transfer.kv_connector is None:
        return None
    name, extra = transfer.kv_connector, transfer.kv_connector_extra_config
    if name not in (PRIVATE, TIERED) or transfer.kv_connector_module_path:
        return f"the KV connector must be {TIERED} or {PRIVATE}, which move blocks as bytes, got {name}"
    spec = extra.get("spec_name", SPECS[0])
    if spec not in SPECS or extra.get("spec_module_path"):
        return f"the spec_name of {TIERED} must be one of {list(SPECS)}, got {spec}"
    other = sorted({str(tier.get("type")) for tier in extra.get("secondary_tiers", [])} - {DISK})
    if other:
        return f"behind host memory blocks can go to the tier {DISK}, whose folder is named after format, got {other}"
    return None


def name_folders(config: VllmConfig, switch: Switch) -> None:
    """Let blocks on disk lie in a folder of their format and calibration."""
    if not disks(config):
        return

    def named(tier: dict[str, Any]) -> dict[str, Any]:
        root = Path(tier["root_dir"]) if "root_dir" in tier else None
        if root is None or root.name.startswith(_PREFIX):
            return tier
        return {**tier, "root_dir": str(root / folder(config, switch))}

    extra = config.kv_transfer_config.kv_connector_extra_config
    tiers = [named(tier) for tier in extra["secondary_tiers"]]
    # the caller's own stays as it is, for another engine
    config.kv_transfer_config.kv_connector_extra_config = {**extra, "secondary_tiers": tiers}


def check_device(config: VllmConfig, device_type: str) -> None:
    """Refuse to start where vLLM's connectors would fail: they copy from a GPU."""
    transfer = config.kv_transfer_config
    if device_type == "cpu" and transfer is not None and transfer.kv_connector is not None:
        raise InputError(
            f"vLLM moves blocks from a GPU to its host and back: {transfer.kv_connector} has no use on a CPU"
        )


def check_folders(config: VllmConfig, switch: Switch) -> None:
    """Refuse to start where a worker stores other bytes than the name of their folder says."""
    for tier in disks(config):
        named, found = Path(tier["root_dir"]).name, folder(config, switch)
        if named != found:
            raise InputError(f"the calibration or policy changed while vLLM started: blocks go to {named}, not {found}")


def disks(config: VllmConfig) -> list[dict[str, Any]]:
    """Tiers on disk, whose folders are named after the calibration that is kept."""
    transfer = config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    return [tier for tier in extra.get("secondary_tiers", []) if "root_dir" in tier]


def folder(config: VllmConfig, switch: Switch) -> str:
    """One name for all that decides what bytes mean."""
    if switch.policy is not None:
        taught = switch.policy.dumps()
    elif switch.measured:
        taught = _kept(config).dumps()
    else:
        taught = ""
    device = config.device_config.device_type
    text = "\n".join((__version__, str(switch.format), str(switch.plain), device, taught))
    return _PREFIX + hashlib.sha256(text.encode()).hexdigest()[:24]


def identity(config: VllmConfig) -> str:
    """Of the model that an engine serves; FileError where its weights are in no files that can be read."""
    from ..models import folder_of

    model, parallel = config.model_config, config.parallel_config
    overrides = model.hf_overrides if isinstance(model.hf_overrides, dict) else None
    random = None
    if config.load_config.load_format == "dummy":  # vLLM draws them with a fixed seed, in each rank's part
        parts = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        random = f"{model.dtype} {parts} {model.quantization}"
    return identity_of(folder_of(model.model), overrides, random=random)


def _kept(config: VllmConfig) -> Calibration:
    try:
        fitted = config.device_config.device_type in FITTED_ON
        found = Calibration.kept(identity(config), fitted)
    except FileError as error:
        raise InputError(f"blocks on disk are named after the calibration of their model: {error}") from error
    if found is None:
        raise InputError(
            "blocks on disk are named after the calibration of their model, which must be made before:"
            f" aurakv calibrate {config.model_config.model}"
        )
    return found
