"""Rivals: simulated presets against a plain loop, transformers' quantised caches where they are installed."""

import math

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from aurakv.errors import InputError  # noqa: E402
from aurakv.evaluation import compare, rivals  # noqa: E402
from aurakv.evaluation.tensors import bytes_of  # noqa: E402

LEVELS = {3: [0.2450942, 0.7560053, 1.3439093, 2.1519457]}
LEVELS[4] = [0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896]


def config(**options):
    base = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16}
    return transformers.LlamaConfig(
        **{**base, "num_hidden_layers": 6, "num_key_value_heads": 2, "initializer_range": 0.3, **options}
    )


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config()).eval()


def hadamard(n):
    return [[(-1) ** bin(i & j).count("1") / math.sqrt(n) for j in range(n)] for i in range(n)]


@pytest.mark.parametrize("bits", [3, 4])
def test_keys_as_vllm_stores_them(bits):
    x = torch.randn(16, generator=torch.Generator().manual_seed(bits))
    h = hadamard(16)
    norm = math.sqrt(sum(v * v for v in x.tolist()))
    rotated = [sum(h[i][j] * x[j].item() / norm for j in range(16)) for i in range(16)]
    levels = [s * v / 4 for v in LEVELS[bits] for s in (1, -1)]  # σ of a coordinate is 1/√16
    found = [min(levels, key=lambda level, y=y: abs(level - y)) for y in rotated]
    size = math.sqrt(sum(v * v for v in found))
    half = float(torch.tensor(norm).half())
    expected = [half * sum(h[i][j] * found[i] / size for i in range(16)) for j in range(16)]
    assert rivals._keys(x[None], bits)[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("bits", [3, 4])
def test_values_as_vllm_stores_them(bits):
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(bits))
    got = rivals._values(x, bits)
    step = (x.amax(1) - x.amin(1)) / (2**bits - 1)
    assert bool(((got - x).abs() <= 0.51 * step[:, None] + 2e-3).all())
    assert max(len(row.unique()) for row in got) <= 2**bits
    assert bool((rivals._values(torch.full((1, 16), 0.5), bits) == 0.5).all())


def test_float8_keys():
    x = torch.tensor([[0.1, 1.0, -3.3, 200.0]])
    assert torch.equal(rivals._keys(x, 8), x.to(torch.float8_e4m3fn).float())


def test_presets_count_their_bytes_and_reads(model):
    ids = torch.randint(1, 64, (1, 40), generator=torch.Generator().manual_seed(2))
    makers = {name: lambda name=name: rivals.make(name, model.config) for name in rivals.PRESETS}
    rows = {row.name: row for row in compare(model, ids, makers, chunk=16)}
    raw = 4 * 2 * (16 + 16) * 2  # four layers of two heads in bfloat16
    slots = {"turboquant_k8v4": 16 + 12, "turboquant_4bit_nc": 10 + 12, "turboquant_k3v4_nc": 8 + 12}
    for name, slot in {**slots, "turboquant_3bit_nc": 8 + 10}.items():
        assert rows[name].bytes_per_token == raw + 2 * 2 * slot
        assert (rows[name].tokens_from_codes, rows[name].reads_from_codes) == (40, pytest.approx(2 / 6))
        assert rows[name].kl > 0
    assert rows["turboquant_k8v4"].kl < rows["turboquant_4bit_nc"].kl < rows["turboquant_3bit_nc"].kl


def test_windows_hold_only_their_tokens():
    torch.manual_seed(0)
    options = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
    sliding = transformers.Gemma3TextConfig(**config().to_dict() | {"model_type": "gemma3_text", **options})
    model = transformers.AutoModelForCausalLM.from_config(sliding, dtype=torch.float32).eval()
    cache = rivals.make("turboquant_4bit_nc", sliding)
    with torch.no_grad():
        model(torch.randint(1, 64, (1, 30)), past_key_values=cache)
    tokens = [layer.keys.shape[2] for layer in cache.layers]
    assert tokens == [7, 7, 7, 7, 7, 30]
    assert bytes_of(cache) == 2 * ((7 + 7 + 7 + 30) * 64 + (7 + 7) * 22)
    assert cache.reads(29, 30).all == 5 * 8 + 30


@pytest.mark.parametrize("name", ["quanto-4", "quanto-2", "hqq-4", "hqq-3", "hqq-2"])
def test_quantised_caches_of_transformers(model, name):
    reason = rivals.why_not(name)
    if reason is not None:
        with pytest.raises(InputError, match="needs the package"):
            rivals.make(name, model.config)
        pytest.skip(reason)
    ids = torch.randint(1, 64, (1, 320), generator=torch.Generator().manual_seed(3))
    row = compare(model, ids, {name: lambda: rivals.make(name, model.config)}, chunk=64)[1]
    assert row.kl > 1e-5
    assert row.tokens_from_codes == 192  # after five chunks of 64: the first, then pairs
    shares = [0, 64, 64, 192, 192]
    reads = sum(64 * coded for coded in shares) / sum(range(1, 321))
    assert row.reads_from_codes == pytest.approx(reads)
    assert row.bytes_per_token < 6 * 2 * 2 * 16 * 4


def test_unknown_rival(model):
    with pytest.raises(InputError, match="a rival is one of"):
        rivals.make("nothing", model.config)
