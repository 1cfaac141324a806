"""Writes tests/golden/codec.json: signs of every dimension, and codes and scales of every dimension and width.

Run it only when the byte format changes on purpose; files and transfers of the old format become unreadable.
"""

import json
import pathlib

import torch

import aurakv as kv
from aurakv.format.levels import CODE_BITS, TABLES, widths
from aurakv.format.rotation import signs

PATH = pathlib.Path(__file__).parents[1] / "tests" / "golden" / "codec.json"
DIMS = (64, 80, 96, 112, 128, 160, 192, 256, 512, 576)


def vector(dim: int) -> torch.Tensor:
    """A fixed vector in (−1, 1) from integer arithmetic alone, [1, 1, dim] float64."""
    return torch.tensor(
        [[[(i * 2654435761 + 12345) % 2**32 / 2**31 - 1 for i in range(1, dim + 1)]]], dtype=torch.float64
    )


def sign_bits(dim: int, seed: int) -> str:
    return "".join("-" if s < 0 else "+" for s in signs(dim, seed))


def encoded(codec: kv.Codec) -> dict[str, object]:
    codes = kv.encode(vector(codec.dim), codec, backend="reference")
    return {"bytes": bytes(codes.data.flatten().tolist()).hex(), "scale": codes.scale.view(torch.int16).item()}


def golden() -> dict[str, object]:
    result: dict[str, object] = {}
    for dim in DIMS:
        result[f"signs {dim}"] = [sign_bits(dim, seed) for seed in (0, 1)]
        for bits in CODE_BITS:
            result[f"key {dim} {bits}"] = encoded(kv.Codec.key(dim, bits))
            result[f"value {dim} {bits}"] = encoded(kv.Codec.value(dim, bits))
    for bits in CODE_BITS:
        for name in TABLES:
            if bits in widths(name):
                result[f"levels {name} {bits}"] = [x for x in kv.Codec(64, bits, table=name).levels if x > 0]
    return result


if __name__ == "__main__":
    PATH.write_text(json.dumps(golden(), indent=0) + "\n")
