"""What was measured on: devices and versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "numpy", "triton", "transformers", "safetensors", "rich", "matplotlib")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines) if value}
    return (
        f"{facts.get('model name', platform.machine())}, family {facts.get('cpu family')}, model {facts.get('model')}"
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory(device: torch.device) -> int | None:
    """Bytes of memory that the device has, if it tells."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def devices() -> list[torch.device]:
    """Devices that torch can compute on here."""
    found = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    return [*found, torch.device("cpu")]


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    if device.type == "mps":
        mps = torch.backends.mps
        return f"{mps.get_name()}, {mps.get_core_count()} GPU cores" if hasattr(mps, "get_core_count") else "Apple GPU"
    return f"{cpu_name()}, {cores()} cores"


def versions() -> dict[str, str | None]:
    """Version of each package that aurakv can use; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def facts(device: torch.device) -> dict[str, Any]:
    """What a result is labelled with."""
    known = {name: version for name, version in versions().items() if version is not None}
    return {"device": device_name(device), "threads": torch.get_num_threads(), "versions": known}


def save(path: Path, device: torch.device, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows that the program of this process measured, with its command line and the commit it is at."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {**facts(device), "command": " ".join(["python", *sys.argv]), "commit": commit}
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
