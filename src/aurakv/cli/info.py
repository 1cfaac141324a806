"""aurakv info: devices, backends, and why each unavailable one is."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .. import __version__
from . import arguments
from .screen import Screen, bytes_text

if TYPE_CHECKING:
    import torch


def add(subparsers: Any) -> None:
    arguments.command(
        subparsers,
        "info",
        run,
        "show devices, backends and versions",
        "For each device: the backends, best first, and one sentence for each that cannot run there;\n"
        "on a GPU also which kernels it gets.",
        ["aurakv info", "aurakv info --json  # for a bug report"],
    )


def run(args: argparse.Namespace) -> None:
    from .. import models
    from ..bench import machine

    screen = Screen(args)
    rows = [_device(device) for device in machine.devices()]
    versions = {"aurakv": __version__, **machine.versions()}
    model = models.path()
    for row in rows:
        memory = "" if row["memory"] is None else f", {bytes_text(row['memory'])} of memory"
        screen.table(
            f"{row['device']}: {row['name']}{memory}",
            ["backend", "", "why not, or how"],
            [(name, "" if why else "chosen" if name == row["chosen"] else "runs", why or row["paths"].get(name, ""))
             for name, why in row["backends"].items()],
        )  # fmt: skip
    screen.table("versions", ["package", "version"], [(name, v or "not installed") for name, v in versions.items()])
    screen.say(f"embedded model: {model if model.is_dir() else 'made when first used, in ' + str(model.parent)}")
    screen.result({"devices": rows, "versions": versions, "model": str(model) if model.is_dir() else None})


def _device(device: torch.device) -> dict[str, Any]:
    from .. import backends
    from ..backends import metal
    from ..backends.triton import backend as triton
    from ..bench import machine

    why_not = {name: backends.why_not(name, None, device) for name in backends.names()}
    paths = {"triton": triton.path(device)} if why_not["triton"] is None else {}
    if why_not["metal"] is None:
        paths["metal"] = metal.LIMIT
    return {
        "device": str(device),
        "name": machine.device_name(device),
        "memory": machine.memory(device),
        "chosen": backends.select(None, None, device).name,
        "backends": why_not,
        "paths": paths,
    }
