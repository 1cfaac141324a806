"""Damaged and hostile files through `aurakv.load`: python tools/fuzz_files.py --cases 100000 --seed 0

Every file must give a FileError with a short sentence, or a cache whose tables and reference counts are right and which
can attend, append and free. No tensor made while loading may be much larger than the file.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import math
import random
import struct
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import aurakv as kv
from aurakv.errors import CapacityError, FileError, InputError
from aurakv.storage.uncompressed import Uncompressed

NUMBERS = [-(2**31), -2, -1, 0, 1, 2, 3, 4, 15, 16, 17, 31, 48, 63, 64, 65, 100, 127, 128, 255, 256, 1000, 1024, 4096]
NUMBERS += [2**15, 2**16, 2**20, 2**27, 2**31 - 17, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, 10**30]
OTHERS = [1.0, 64.5, math.nan, math.inf, True, False, None, "", "64", "1", "f16", "ring", "paged", "contiguous", [], {}]
OTHERS += [[64], {"a": 1}, "k4v4", "k4:int8:l2:f16:seed0/v4:cubic:lsq:f16:seed1", "k16:f16/v16:f16", "x" * 5000]
OTHERS += ["k2:[nan,0,1,2]:l2:f16:seed0/v2:cubic:lsq:f16:seed1", "k2:[0,1,2,1e60]:l2:f16:seed0/v2:cubic:lsq:f16:seed1"]
OTHERS += ["k2:[-1,-0.5,0.5,3]:l2:f32:seed9/v16:bf16", "k16:bf16/v3:lloyd-max:lsq:f32:seed18446744073709551616"]
DTYPES = ["U8", "I8", "I32", "I64", "F32", "F16", "BF16", "F64", "BOOL", "F8_E4M3", "XX"]


def corpus() -> list[bytes]:
    """Small files of every kind of cache."""
    torch.manual_seed(0)
    levels = (-2.0, -0.5, 0.25, 1.5)
    own = kv.Format(kv.Codec.key(32, 2, table=levels, seed=7), kv.Codec.value(16, 3, dtype=torch.float32))
    kept = Uncompressed(first=3, recent=5, dtype=torch.float16, rollback=4)
    k4, mixed = kv.Format.parse("k4v4", 16), kv.Format.parse("k16:f16/v2", (8, 32))
    offset = torch.randn(2, 32)
    pools = [kv.PagePool(f, 40, size, 2) for f, size in ((k4, 4), (own, 5), (mixed, 16))]
    caches = [
        kv.KVCache.contiguous(k4, 3, 2),
        kv.KVCache.contiguous(own, 2, 2, uncompressed=kept, key_offset=offset),
        kv.KVCache.contiguous(mixed, 0, 1),
        kv.KVCache.ring(k4, 2, 2, window=8, sinks=3, page_size=4, chunk=4, rollback=2),
        kv.KVCache.ring(own, 3, 2, window=5, page_size=3, chunk=2, uncompressed=kept),
        kv.KVCache.ring(k4, 0, 2, window=64, sinks=4),
        kv.KVCache.paged(pools[0], 4),
        kv.KVCache.paged(pools[1], 3, max_tokens=40, uncompressed=Uncompressed(recent=2)),
        kv.KVCache.paged(pools[2], 3, max_tokens=64),
    ]
    files = []
    for cache in caches:
        for _ in range(3 if cache.seqs else 0):
            counts = [random.Random(len(files) + seq).randrange(0, 12) for seq in range(cache.seqs)]
            append(cache, counts)
        if cache.seqs > 2:
            cache.free(1)
            cache.fork(2, 1)
            append(cache, [1] * cache.seqs)
        files.append(saved(cache))
    return files


def append(cache: kv.KVCache, counts: list[int]) -> None:
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    heads, fmt = cache.pool.kv_heads, cache.format
    k, v = (torch.randn(starts[-1], heads, codec.dim) for codec in (fmt.key, fmt.value))
    cache.append(k, v, starts)


def saved(cache: kv.KVCache) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        kv.save(cache, Path(folder, "x"))
        return Path(folder, "x").read_bytes()


class File:
    """A file taken apart: the manifest, and dtype, shape and bytes of each tensor."""

    def __init__(self, raw: bytes) -> None:
        size = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + size])
        self.manifest = json.loads(header.pop("__metadata__")["aurakv"])
        self.tensors = {
            name: [info["dtype"], info["shape"], bytearray(raw[8 + size :][slice(*info["data_offsets"])])]
            for name, info in header.items()
        }

    def numbers(self, name: str) -> list[int]:
        data = self.tensors[name][2]
        return list(struct.unpack(f"<{len(data) // 4}i", data))

    def set_numbers(self, name: str, numbers: list[int], shape: list[int] | None = None) -> None:
        self.tensors[name][2] = bytearray(struct.pack(f"<{len(numbers)}i", *numbers))
        if shape is not None:
            self.tensors[name][1] = shape

    def text(self, seal: bool = True) -> str:
        """The manifest, with the checksums put right unless not wanted."""
        if seal:
            if isinstance(self.manifest.get("checksums"), dict):
                self.manifest["checksums"] = {
                    name: hashlib.sha256(x[2]).hexdigest() for name, x in self.tensors.items()
                }
            self.manifest.pop("checksum", None)
            canonical = json.dumps(self.manifest, sort_keys=True, separators=(",", ":"))
            self.manifest["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
        return json.dumps(self.manifest, sort_keys=True, separators=(",", ":"))

    def raw(self, seal: bool = True, text: str | None = None) -> bytes:
        return container({"aurakv": self.text(seal) if text is None else text}, self.tensors)


def container(metadata: object, tensors: dict[str, list]) -> bytes:
    """A safetensors file, written by hand so that it can be wrong."""
    header: dict[str, object] = {"__metadata__": metadata}
    blob = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + blob


def mutate(rng: random.Random, files: list[bytes]) -> bytes:
    raw = rng.choice(files)
    kind = rng.randrange(10)
    if kind == 0:
        return damage_bytes(rng, raw)
    if kind == 1:
        return cut(rng, raw)
    if kind == 2:
        return random_file(rng)
    file = File(raw)
    if kind == 3:
        other = File(rng.choice(files))
        if rng.random() < 0.5:
            file.manifest = other.manifest
        else:
            name = rng.choice(sorted(other.tensors))
            file.tensors[name] = other.tensors[name]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice((mutate_field, mutate_field, mutate_numbers, mutate_numbers, mutate_tensor))(rng, file)
    if rng.random() < 0.05:
        text = file.text()
        at = rng.randrange(len(text))
        return file.raw(text=rng.choice((text[:at], text + text, text[:-1] + ',"kind":"aurakv-cache"}', "[" * 9000)))
    return file.raw(seal=rng.random() < 0.95)


def damage_bytes(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    header = int.from_bytes(raw[:8], "little") + 8
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(header if rng.random() < 0.5 else len(data))
        data[at] = rng.choice((data[at] ^ (1 << rng.randrange(8)), rng.randrange(256), 0, 255, 34, 48))
    return bytes(data)


def cut(rng: random.Random, raw: bytes) -> bytes:
    a, b = sorted((rng.randrange(len(raw) + 1), rng.randrange(len(raw) + 1)))
    return rng.choice((raw[:a], raw[a:], raw[:a] + raw[b:], raw[:b] + raw[a:], raw + raw[a:b], raw + b"\0"))


def random_file(rng: random.Random) -> bytes:
    blob = rng.randbytes(rng.choice((0, 1, 7, 8, 9, 64, 1000)))
    if rng.random() < 0.3:
        return blob
    text = rng.choice((blob, b"{}", b"[]", b'{"__metadata__":{}}', b'{"__metadata__":{"aurakv":"{}"}}', b"[" * 60000))
    size = rng.choice((len(text), len(text), rng.choice(NUMBERS) % 2**64))
    return size.to_bytes(8, "little") + text + rng.randbytes(rng.choice((0, 8)))


def mutate_field(rng: random.Random, file: File) -> None:
    fields = file.manifest
    name = rng.choice([*fields, "window", "max_width", "new"])
    action = rng.random()
    if action < 0.05:
        fields.pop(name, None)
    elif action < 0.65 and type(fields.get(name)) is int:
        fields[name] = rng.choice((rng.choice(NUMBERS), fields[name] + rng.choice((-1, 1)), fields[name] * 2))
    elif action < 0.8 and isinstance(fields.get(name), str) and fields[name]:
        text = list(fields[name])
        text[rng.randrange(len(text))] = rng.choice("0123456789:/[],kvfe-.xl")
        fields[name] = "".join(text)
    else:
        fields[name] = rng.choice(NUMBERS + OTHERS)


def mutate_numbers(rng: random.Random, file: File) -> None:
    """Change table entries, lengths or offsets."""
    names = [name for name in file.tensors if not name.endswith("pages") and len(file.tensors[name][2]) >= 4]
    if not names:
        return
    name = rng.choice(names)
    numbers = file.numbers(name)
    at, other = rng.randrange(len(numbers)), rng.randrange(len(numbers))
    if name.endswith("offset"):
        numbers[at] = rng.choice((0x7FC00000, 0x7F800000, -0x00800000, 0x7F7FFFFF, 0))  # nan, ±inf, largest, 0
    else:
        small = [n for n in NUMBERS if -(2**31) <= n < 2**31]
        numbers[at] = rng.choice((rng.choice(small), min(numbers[at] + 1, 2**31 - 1), numbers[other], 0, -1))
    if rng.random() < 0.3:
        numbers[at], numbers[other] = numbers[other], numbers[at]
    file.set_numbers(name, numbers)


def mutate_tensor(rng: random.Random, file: File) -> None:
    """Change what the container says about a tensor, or which tensors there are."""
    if not file.tensors:
        return
    name = rng.choice(sorted(file.tensors))
    tensor = file.tensors[name]
    action = rng.randrange(7)
    if action == 0:
        del file.tensors[name]
    elif action == 1:
        file.tensors[rng.choice(("new", "highest", "key_offset", "exact_table", "value_offset"))] = tensor
    elif action == 2:
        tensor[0] = rng.choice(DTYPES)
    elif action == 3 and tensor[1]:
        tensor[1] = list(tensor[1])
        tensor[1][rng.randrange(len(tensor[1]))] = rng.choice(NUMBERS)
    elif action == 4:
        tensor[1] = rng.choice((list(reversed(tensor[1])), [*tensor[1], 1], tensor[1][1:], [math.prod(tensor[1])], []))
    elif tensor[1] and tensor[1][0]:  # one row more or less, consistently
        row = len(tensor[2]) // tensor[1][0]
        more = action == 5
        tensor[2] = tensor[2] + tensor[2][:row] if more else tensor[2][row:]
        tensor[1] = [tensor[1][0] + (1 if more else -1), *tensor[1][1:]]


class SmallTensors(TorchDispatchMode):
    """Refuses operations whose results have more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu" and x.untyped_storage().nbytes() > self.limit:
                raise AssertionError(f"{func} made {x.untyped_storage().nbytes()} bytes, more than {self.limit}")
        return result


def judge(path: Path, raw: bytes) -> str | None:
    """None for a right cache, the sentence for a refused file; anything else is an error of the library."""
    path.write_bytes(raw)
    try:
        with SmallTensors(8 * len(raw) + 4096):
            cache = kv.load(path, backend="reference")
    except FileError as error:
        sentence = str(error)
        assert len(sentence) < 1000, sentence
        assert "\n" not in sentence, sentence
        return sentence
    exercise(cache)
    return None


def exercise(cache: kv.KVCache) -> None:
    """A cache from outside must work to the end: attend, append, free."""
    tables = cache.page_tables
    pools = [table.pool for table in tables]
    lengths = cache.lengths
    attend_all(cache)
    room = all(pool.num_pages and pool.data[:1].nbytes < 2**20 for pool in pools)
    if cache.seqs and room and max(lengths) < 2**31 - 4:
        with contextlib.suppress(CapacityError):  # a pool without spare pages
            append(cache, [1] * cache.seqs)
            append(cache, [3] * cache.seqs)
        attend_all(cache)
    for seq in range(cache.seqs):
        cache.free(seq)
    for pool in pools:
        assert pool.free_pages == pool.num_pages, "a page is lost"
    assert cache.lengths == [0] * cache.seqs


def attend_all(cache: kv.KVCache) -> None:
    for table in cache.page_tables:
        table.pages.check()
        table.pages.check_values()
    lengths = cache.lengths
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + (length > 0))
    q = torch.ones(starts[-1], cache.pool.kv_heads, cache.format.key.dim)
    try:
        part = cache.attend(q, starts)
    except InputError as error:  # a ring that was rolled back as far as it goes: only its next token may attend
        if "no longer held" not in str(error):
            raise
        return
    assert part.out.shape == (starts[-1], cache.pool.kv_heads, cache.format.value.dim)
    for seq, length in enumerate(lengths):
        assert length == 0 or int(cache.positions(seq)[-1]) == length - 1
        cache.decode(seq)


def run(cases: int, seed: int, folder: Path) -> collections.Counter[str]:
    """How often each outcome came; the first words of a sentence stand for it."""
    files, outcomes = corpus(), collections.Counter[str]()
    path = folder / "case.aurakv"
    for raw in files:
        assert judge(path, raw) is None
    for case in range(cases):
        raw = mutate(random.Random(f"{seed}/{case}"), files)
        try:
            sentence = judge(path, raw)
        except BaseException:
            print(f"case {case} of seed {seed}, kept as {path}", file=sys.stderr)
            raise
        outcomes["a right cache" if sentence is None else " ".join(sentence.split(": ", 1)[1].split()[:5])] += 1
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    outcomes = run(args.cases, args.seed, Path(tempfile.mkdtemp()))
    for outcome, count in outcomes.most_common():
        print(f"{count:8} {outcome}")
    print(f"{args.cases} files in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
