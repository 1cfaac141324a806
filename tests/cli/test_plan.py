"""aurakv plan: its bytes are those that a cache holds."""

import pytest
import torch

pytest.importorskip("rich", reason="rich is not installed")
import aurakv
from aurakv.calibration.policy import LayerPolicy, Policy
from aurakv.storage.uncompressed import Uncompressed

SHAPE = ("--layers", 3, "--kv-heads", 2, "--head-dim", 64)


def test_plan_counts_what_a_cache_holds(answer):
    plan = answer(
        "plan", "--memory", "1GB", *SHAPE, "--window", 100, "--window-layers", 1, "--tokens", 640, "--formats", "k4v3"
    )
    (row,) = plan["rows"]
    format = aurakv.Format.parse("k4v3", 64)
    caches = [
        aurakv.KVCache.ring(format, 1, 2, window=100, rollback=32),
        *(aurakv.KVCache.contiguous(format, 1, 2, capacity=640) for _ in range(2)),
    ]
    x = torch.randn(640, 2, 64)
    for cache in caches:
        cache.append(x, x, [0, 640])
    uncompressed = 3 * 4 * 2 * 2 * 64 * 2  # layers, first tokens, sides, KV heads, dim, bytes
    assert row["bytes_per_sequence"] == sum(cache.pool.data.nbytes for cache in caches) + uncompressed
    assert row["bytes_per_token"] == 2 * 2 * format.bytes_per_token
    assert row["sequences"] == 10**9 // row["bytes_per_sequence"]
    assert row["read_per_step"] == 2 * format.bytes_per_token * (2 * 640 + 100)
    assert row["seconds_per_step"] == pytest.approx(row["read_per_step"] / plan["bandwidth"])


def test_plan_finds_the_longest_sequence(answer):
    options = ("--memory", "1MiB", *SHAPE, "--formats", "k4v4", "--bandwidth", "1GB")
    tokens = answer("plan", *options)["rows"][0]["tokens"]
    (fits,) = answer("plan", *options, "--tokens", tokens)["rows"]
    (over,) = answer("plan", *options, "--tokens", tokens + 1)["rows"]
    assert fits["bytes_per_sequence"] <= 2**20 < over["bytes_per_sequence"]
    assert (fits["sequences"], over["sequences"]) == (1, 0)


def test_plan_of_a_tiny_budget(answer):
    (row,) = answer("plan", "--memory", 10, *SHAPE, "--formats", "k4v4", "--bandwidth", "1GB")["rows"]
    assert (row["tokens"], row["sequences"]) == (0, 0)


def test_plan_prints_every_number(call, answer):
    options = ("plan", "--memory", "1GB", "--bandwidth", "20GB")
    code, out, _ = call(*options)
    assert code == 0
    for row in answer(*options)["rows"]:
        (line,) = (line for line in out.splitlines() if row["format"] in line.split())
        assert f"{row['bytes_per_token']:,}" in line
        assert f"{row['tokens']:,}" in line


def test_plan_of_a_model(answer, refused, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from aurakv.hf import AuraCache

    config = transformers.Gemma3TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, sliding_window=128, max_position_embeddings=4096,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], architectures=["Gemma3ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    plan = answer(
        "plan", "--memory", "1GB", "--model", tmp_path, "--tokens", 1024, "--formats", "k4v4,k16v16", "--dtype", "f32"
    )
    for row in plan["rows"]:
        cache = AuraCache(config, row["format"])
        x = torch.randn(1, 1, 1024, 32)
        for layer in range(4):
            cache.update(x, x, layer)
        assert [layer.get_seq_length() for layer in cache.layers] == [1024] * 4  # asking stores what was given
        tables = [table for layer in cache.compressed for table in layer.cache.page_tables]
        assert row["bytes_per_sequence"] == sum(table.pool.data.nbytes for table in tables)
    assert [(group["window"], group["count"]) for group in plan["layers"]] == [(128, 3), (None, 1)]


@pytest.mark.parametrize(("first", "recent"), [(4, 0), (0, 40), (100, 7), (0, 0)])
def test_plan_of_a_policy(answer, refused, tmp_path, first, recent):
    policy = Policy(2, 64, tuple(LayerPolicy(name) for name in ("k8v4", "k16v16", "k3v3")), first, recent)
    policy.save(tmp_path / "policy.json")
    options = ("plan", "--memory", "1GB", "--formats", tmp_path / "policy.json", "--tokens", 640, "--bandwidth", "1GB")
    (row,) = answer(*options, *SHAPE)["rows"]
    held = 0
    for layer in policy.layers:
        format = aurakv.Format.parse(layer.format, 64)
        uncompressed = Uncompressed(first, recent, torch.bfloat16, 0) if format.key.coded else None
        cache = aurakv.KVCache.contiguous(format, 1, 2, capacity=640, uncompressed=uncompressed)
        cache.append(torch.zeros(640, 2, 64), torch.zeros(640, 2, 64), [0, 640])
        held += sum(table.pool.data.nbytes for table in cache.page_tables)
    assert row["bytes_per_sequence"] == held
    assert row["bytes_per_token"] == policy.bytes_per_token
    assert "this policy is for a model of 3 KV layers" in refused(*options)


def test_plan_refuses(refused, tmp_path):
    assert "must be a size" in refused("plan", "--memory", "lots")
    assert "--memory" in refused("plan")
    assert "tokens such as" in refused("plan", "--memory", 1, "--tokens", "0")
    assert "bits must be one of" in refused("plan", "--memory", "1GB", "--formats", "k9v4")
    said = refused("plan", "--memory", "1GB", "--formats", "k4v4,four")
    assert "a format name is" in said
    assert "got 'four'; a policy is a .json file or one of" in said
    assert "k9v9 in --formats: bits must be one of" in refused("plan", "--memory", "1GB", "--formats", "k4v4,k9v9")
    assert "smollm2-135m in --formats: this policy is for" in refused(
        "plan", "--memory", "1GB", *SHAPE, "--formats", "k4v4,smollm2-135m"
    )
    assert "together" in refused("plan", "--memory", "1GB", "--layers", 3)
    assert "at most --layers" in refused("plan", "--memory", "1GB", *SHAPE, "--window", 9, "--window-layers", 4)
    assert "belong to --layers" in refused("plan", "--memory", "1GB", "--window", 9)
    assert "head_dim" in refused("plan", "--memory", "1GB", *SHAPE[:4], "--head-dim", 63)
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert "there is no folder" in refused("plan", "--memory", "1GB", "--model", tmp_path / "none")
    assert "must be a folder with a model" in refused("plan", "--memory", "1GB", "--model", tmp_path)
