"""Damaged and hostile files: refused in one sentence, without more memory than the file has bytes."""

import json

import pytest

import aurakv as kv
from aurakv.errors import FileError
from tests.storage.file_cases import contiguous_file, fmt, paged_file, ring_file
from tools.fuzz_files import File, SmallTensors, container, run, saved


def field(name, value):
    def change(file):
        file.manifest[name] = value

    return change


def without(name):
    return lambda file: file.manifest.pop(name)


def number(name, at, value):
    def change(file):
        numbers = file.numbers(name)
        numbers[at] = value
        file.set_numbers(name, numbers)

    return change


def tensor(name, *new):
    def change(file):
        if new:
            file.tensors[name] = list(new)
        else:
            del file.tensors[name]

    return change


def spelled(**options):
    key = {"table": "int8", "scale": "l2", "dtype": "f16", "seed": "seed0"} | options
    return field("format", f"k4:{':'.join(key.values())}/v4:cubic:lsq:f16:seed1")


NAN, INF = 0x7FC00000, 0x7F800000
BAD = [
    (ring_file, field("kind", "other"), "must describe itself as 'aurakv-cache'"),
    (ring_file, field("version", 2), "version must be 1, got 2"),
    (ring_file, field("version", True), "version must be 1, got True"),
    (ring_file, without("version"), "version must be 1, got None"),
    (ring_file, field("storage", "heap"), "storage must be one of .* got heap"),
    (ring_file, field("storage", ["ring"]), "storage must be one of"),
    (ring_file, without("window"), r"fields are not those of a cache: missing \['window'\], unknown \[\]"),
    (ring_file, field("extra", 1), r"missing \[\], unknown \['extra'\]"),
    (ring_file, field("max_width", 3), r"unknown \['max_width'\]"),
    (paged_file, field("window", 3), r"unknown \['window'\]"),
    (ring_file, field("format", 4), "format must be a text, got 4"),
    (ring_file, field("format", "k4v4"), "format must be k<bits>:<options>/v<bits>:<options>, got k4v4"),
    (ring_file, field("format", "k4:int8/v4:cubic"), "format must spell out every option"),
    (ring_file, field("format", "k7:int8/v4:cubic"), "format is wrong: bits must be one of"),
    (ring_file, spelled(table="[" + ",".join(["nan"] * 16) + "]"), "levels must be"),
    (ring_file, spelled(table="[" + ",".join(["1e60"] * 16) + "]"), "levels must be finite"),
    (ring_file, spelled(table="[1,2]"), "needs 16 levels, got 2"),
    (ring_file, spelled(table="[a]"), "levels must be"),
    (ring_file, spelled(table="[" + ",".join(map(str, range(16, 0, -1))) + "]"), "levels must be sorted"),
    (ring_file, spelled(dtype="bf16"), "scales are stored as f16 or f32"),
    (ring_file, spelled(seed="seed18446744073709551616"), "seed must be a whole number from 0"),
    (ring_file, field("key_dim", 0), "key_dim must be a whole number from 1 to 1024, got 0"),
    (ring_file, field("key_dim", 33), "format is wrong: head_dim must be"),
    (ring_file, field("value_dim", 2**40), "value_dim must be a whole number from 1 to 1024"),
    (ring_file, field("value_dim", 64), "'pages' must have the shape"),
    (ring_file, field("kv_heads", 2**20), "kv_heads must be a whole number from 1 to 65536"),
    (ring_file, field("kv_heads", 1), "'pages' must have the shape"),
    (ring_file, field("kv_heads", -1), "kv_heads must be a whole number from 1"),
    (ring_file, field("page_size", 0), "page_size must be a whole number from 1"),
    (ring_file, field("page_size", 4.0), "page_size must be a whole number from 1 to 2147483647, got 4.0"),
    (ring_file, field("page_size", 2**31), "page_size must be a whole number from 1"),
    (ring_file, field("page_size", 8), "must have the shape"),
    (paged_file, field("page_size", 2**31 - 1), r"'pages' must have the shape \[n, 2, 77309411296\]"),
    (contiguous_file, field("page_size", 128), "page_size must be 64 for at most 20 tokens, got 128"),
    (contiguous_file, number("lengths", 0, 65), "page_size must be 128 for at most 65 tokens, got 64"),
    (ring_file, field("window", 0), "window must be a whole number from 1"),
    (ring_file, field("window", 2**31 - 1), "a ring keeps at most 2147483647 tokens"),
    (ring_file, field("window", 100), "'table' must have the shape"),
    (ring_file, field("sinks", -1), "sinks must be a whole number from 0"),
    (ring_file, field("chunk", 0), "chunk must be a whole number from 1"),
    (ring_file, field("rollback", None), "rollback must be a whole number from 0 to 2147483647, got None"),
    (paged_file, field("max_width", 4), r"'table' must have the shape \[3, 4\], got \[3, 5\]"),
    (paged_file, field("max_width", 2), "sequences must have at most 16 tokens, got 20"),
    (paged_file, field("max_width", 0), r"'table' must have the shape \[3, 3\]"),
    (ring_file, field("exact_dtype", "f64"), "exact_dtype must be one of"),
    (ring_file, field("exact_dtype", "f32"), "'exact_pages' must have the shape"),
    (ring_file, field("exact_first", 2**31 - 1), "a ring keeps at most"),
    (ring_file, field("exact_recent", -3), "exact_recent must be a whole number from 0"),
    (ring_file, field("exact_rollback", 10**30), "exact_rollback must be a whole number"),
    (ring_file, field("checksums", []), "checksums must be one for each tensor"),
    (paged_file, number("lengths", 0, -1), "lengths must not be negative, got -1"),
    (paged_file, number("lengths", 0, 41), "sequences must have at most 40 tokens, got 41"),
    (paged_file, number("lengths", 0, 2**31 - 1), "sequences must have at most 40 tokens, got 2147483647"),
    (paged_file, number("lengths", 0, 25), "table names pages outside 0"),
    (paged_file, number("lengths", 1, 3), "table must be -1 where a sequence has no tokens"),
    (paged_file, number("table", 0, 5), "table names pages outside 0 … 4"),
    (paged_file, number("table", 0, -1), "table names pages outside 0"),
    (paged_file, number("table", 0, -(2**31)), "table names pages outside 0"),
    (paged_file, number("table", 1, 0), "table names a page at two different entries"),
    (paged_file, number("table", 5, 1), "table leaves pages unused"),
    (paged_file, number("table", 4, 0), "table must be -1 where"),
    (paged_file, number("key_offset", 1, NAN), "key_offset must be finite"),
    (paged_file, number("key_offset", 1, INF), "key_offset must be finite"),
    (ring_file, number("highest", 0, 99), "highest cannot be 99 for a sequence of 100 tokens"),
    (ring_file, number("highest", 0, -1), "highest cannot be -1 for a sequence of 100 tokens"),
    (ring_file, number("highest", 0, 115), "highest cannot be 115 for a sequence of 100 tokens"),
    (ring_file, number("highest", 1, 4), "highest cannot be 4 for a sequence of 3 tokens"),
    (ring_file, number("exact_highest", 0, 2**31 - 1), "exact_highest cannot be 2147483647 for a sequence of 100"),
    (ring_file, number("lengths", 2, 1), "highest cannot be 0 for a sequence of 1 token"),
    (ring_file, number("exact_table", 0, 100), "exact_table names pages outside"),
    (ring_file, tensor("highest"), r"tensors are not those of a cache: missing \['highest'\]"),
    (ring_file, tensor("exact_pages"), r"missing \['exact_pages'\]"),
    (ring_file, tensor("more", "U8", [1], b"x"), r"missing \[\], unknown \['more'\]"),
    (paged_file, tensor("highest", "I32", [1], b"xxxx"), r"unknown \['highest'\]"),
    (paged_file, tensor("lengths", "I64", [3], bytes(24)), "'lengths' must be torch.int32, got torch.int64"),
    (paged_file, tensor("lengths", "I32", [3, 1], bytes(12)), r"'lengths' must have the shape \[n\], got \[3, 1\]"),
    (paged_file, tensor("lengths", "I32", [], bytes(4)), r"'lengths' must have the shape \[n\], got \[\]"),
    (paged_file, tensor("key_offset", "F16", [2, 32], bytes(128)), "'key_offset' must be torch.float32"),
    (paged_file, tensor("key_offset", "F32", [1, 32], bytes(128)), r"'key_offset' must have the shape \[2, 32\]"),
    (paged_file, tensor("pages", "U8", [0, 2, 10], b""), "'pages' must have the shape"),
    (paged_file, tensor("pages", "I8", [4], b"xxxx"), "'pages' must be torch.uint8, got torch.int8"),
]


@pytest.mark.parametrize(("make", "change", "sentence"), BAD, ids=range(len(BAD)))
def test_hostile_files(make, change, sentence, tmp_path):
    file = make()
    (tmp_path / "c").write_bytes(file.raw())
    kv.load(tmp_path / "c")  # right before the change
    change(file)
    refused(tmp_path / "c", file.raw(), sentence)


def refused(path, raw, sentence):
    path.write_bytes(raw)
    with pytest.raises(FileError, match=sentence) as info, SmallTensors(4 * len(raw) + 4096):
        kv.load(path)
    assert str(info.value).startswith(f"{path} is not a cache that can be loaded: ")
    assert "\n" not in str(info.value)
    assert path.read_bytes() == raw


def test_an_offset_at_16_bits(tmp_path):
    file = File(saved(kv.KVCache.contiguous(fmt("k16/v4"), 1, 1)))
    file.tensors["key_offset"] = ["F32", [1, 32], bytes(128)]
    refused(tmp_path / "c", file.raw(), "key_offset has no meaning for vectors stored at 16 bits")


def test_corrupted_and_truncated(tmp_path):
    path, raw = tmp_path / "c", paged_file().raw()
    for name, sentence in (("pages", "'pages' is corrupted"), ("table", "'table' is corrupted")):
        file = paged_file()
        file.tensors[name][2][-1] ^= 1
        refused(path, file.raw(seal=False), f"{sentence}: the checksum differs")
    file = ring_file()
    file.manifest["rollback"] = 1
    refused(path, file.raw(seal=False), "its description is corrupted: the checksum differs")
    refused(path, raw[:-1], "it is not a whole safetensors file")
    refused(path, raw + b"\0", "it is not a whole safetensors file")
    refused(path, b"", "its header is not JSON")
    refused(path, raw[:100], "its header is not JSON")
    refused(path, b"\xff" * 100, "the header of a cache has at most 65536 bytes")
    refused(path, (9000).to_bytes(8, "little") + b"[" * 9000, "its header is not JSON")


def test_every_flipped_bit_is_noticed(tmp_path):
    path, raw = tmp_path / "c", bytearray(saved(kv.KVCache.ring(kv.Format.parse("k2v2", 16), 1, 1, window=2)))
    for at in range(0, len(raw), 3):
        raw[at] ^= 1 << at % 8
        path.write_bytes(raw)
        with pytest.raises(FileError):
            kv.load(path)
        raw[at] ^= 1 << at % 8


def test_metadata_given_twice_or_in_excess(tmp_path):
    path, file = tmp_path / "c", ring_file()
    text = file.text()
    refused(path, file.raw(text=text[:-1] + ',"window":8}'), "a name is given twice")
    refused(path, container({"aurakv": text, "more": "x"}, file.tensors), "its metadata must be a text called 'aurakv'")
    refused(path, container({"other": text}, file.tensors), "its metadata must be a text called 'aurakv'")
    refused(path, container(None, file.tensors), "its metadata must be a text called 'aurakv'")
    raw = file.raw()
    size = int.from_bytes(raw[:8], "little")
    twin = b"{" + b'"__metadata__":{"aurakv":"x"},' + raw[9 : 8 + size]
    refused(path, len(twin).to_bytes(8, "little") + twin + raw[8 + size :], "a name is given twice")
    refused(path, file.raw(text=json.dumps([text])), "must describe itself")
    refused(path, file.raw(text="{" * 5000), "its header is not JSON")


def test_widths_that_cost_nothing_in_a_file_cost_nothing_in_memory(tmp_path):
    """Without sequences a table of any width takes no bytes."""
    for make, name, widest in ((ring_file, "window", 2**30), (paged_file, "max_width", 2**31 - 1)):
        file = make()
        for prefix in ("", "exact_") if name == "window" else ("",):
            file.tensors[f"{prefix}pages"][1:] = [[0, *file.tensors[f"{prefix}pages"][1][1:]], b""]
            file.tensors[f"{prefix}table"][1:] = [[0, file.tensors[f"{prefix}table"][1][1]], b""]
            if name == "window":
                file.set_numbers(f"{prefix}highest", [], [0])
        file.set_numbers("lengths", [], [0])
        width = -(-3 // 4) + -(-(widest + 4 - 1 + 2) // 4) + 1 if name == "window" else widest
        file.manifest[name] = widest
        file.tensors["table"][1] = [0, width]
        (tmp_path / "c").write_bytes(file.raw())
        with SmallTensors(4096):
            assert kv.load(tmp_path / "c").lengths == []


def test_the_memory_limit_of_these_tests_works(tmp_path):
    raw = paged_file().raw()
    (tmp_path / "c").write_bytes(raw)
    with pytest.raises(AssertionError, match="more than"), SmallTensors(4 * len(raw)):
        kv.load(tmp_path / "c", spare_pages=200)


def test_fuzz(tmp_path):
    outcomes = run(1500, 1, tmp_path)
    assert outcomes["a right cache"] > 50
    assert len(outcomes) > 40
