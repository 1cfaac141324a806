"""The evaluation: what it reports is what an independent computation finds."""

import math
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import DynamicCache  # noqa: E402

from aurakv.errors import FileError, InputError  # noqa: E402
from aurakv.evaluation import builtin, compare, ids_of, read  # noqa: E402
from aurakv.evaluation.reads import reads_of  # noqa: E402
from aurakv.evaluation.tensors import bytes_of, tensors_of  # noqa: E402
from aurakv.hf import AuraCache  # noqa: E402

BASE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}
WINDOWS = {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
COUNT = 75


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request):
    torch.manual_seed(0)
    if request.param == "llama":
        config = transformers.LlamaConfig(**BASE)
    else:
        config = transformers.Gemma3TextConfig(**BASE, **WINDOWS)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 96, (1, COUNT), generator=torch.Generator().manual_seed(1))


PLAIN = {"first": 0, "calibrate": False}  # what calibrated keys are depends on the tokens that come at once


def caches(model, *names, **options):
    return {name: lambda name=name: AuraCache(model.config, name, **{**PLAIN, **options}) for name in names}


@torch.no_grad()
def test_rows_say_what_one_forward_pass_says(model, ids):
    before = model.config._attn_implementation
    rows = compare(model, ids, caches(model, "k4v4"), chunk=16)
    assert model.config._attn_implementation == before
    assert [row.name for row in rows] == ["uncompressed", "k4v4"]
    expected = model(ids).logits[0].double().log_softmax(1)
    cache = AuraCache(model.config, "k4v4", **PLAIN)
    model.set_attn_implementation("aurakv")
    ours = model(ids, past_key_values=cache).logits[0].double().log_softmax(1)
    model.set_attn_implementation(before)
    for row, logp in zip(rows, (expected, ours), strict=True):
        nll = -logp[:-1].gather(1, ids[0, 1:, None]).mean()
        assert row.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
        assert (row.tokens, row.predictions) == (COUNT, COUNT - 1)
        assert row.seconds > 0
    kl = (expected.exp() * (expected - ours)).sum(1)[:-1].mean()
    assert rows[1].kl == pytest.approx(float(kl), rel=2e-2)
    assert rows[1].kl > 1e-3, "nothing was compressed"
    assert rows[1].top1 == pytest.approx(float((expected.argmax(1) == ours.argmax(1))[:-1].float().mean()), abs=0.03)
    assert (rows[0].kl, rows[0].top1, rows[0].tokens_from_codes, rows[0].reads_from_codes) == (0, 1, 0, 0)


def test_chunks_change_nothing_and_progress_counts(model, ids):
    told = []
    small = compare(model, ids, caches(model, "k4v4"), chunk=7, progress=lambda *at: told.append(at))
    large = compare(model, ids, caches(model, "k4v4"), chunk=COUNT)
    assert small[1].kl == pytest.approx(large[1].kl, rel=2e-2)
    assert small[1].tokens_from_codes == large[1].tokens_from_codes == COUNT
    assert small[1].reads_from_codes == large[1].reads_from_codes == 1
    done = [at for at, total in told]
    assert {total for _, total in told} == {22}
    assert done == sorted(done)
    assert set(range(1, 23)) <= set(done)
    assert len(done) == 22 * 3, "after each of the two layers of a forward pass, and after its end"


@torch.no_grad()
def test_every_third_prediction(model, ids):
    row = compare(model, ids, caches(model, "k4v4"), chunk=16, every=3)[0]
    logp = model(ids).logits[0].double().log_softmax(1)[:-1:3]
    assert row.predictions == len(logp) == 25
    assert row.perplexity == pytest.approx(math.exp(-logp.gather(1, ids[0, 1::3, None]).mean()), rel=1e-4)
    last = compare(model, ids[:, :65], caches(model, "k4v4"), chunk=16)[1]  # its last chunk predicts nothing
    assert (last.predictions, last.tokens_from_codes) == (64, 65)


def test_sixteen_bits_lose_nothing_and_fewer_bits_lose_more(model, ids):
    names = ("k16v16", "k16v4", "k8v8", "k4v4", "k2v2")
    rows = {row.name: row for row in compare(model, ids, caches(model, *names), chunk=32)}
    assert rows["k16v16"].kl < 1e-6
    assert rows["k16v16"].tokens_from_codes == rows["k16v4"].tokens_from_codes == 0
    assert rows["k16v16"].perplexity == pytest.approx(rows["uncompressed"].perplexity, rel=1e-4)
    assert rows["k16v16"].kl < rows["k8v8"].kl < rows["k4v4"].kl < rows["k2v2"].kl
    assert rows["k2v2"].bytes_per_token < rows["k4v4"].bytes_per_token < rows["k8v8"].bytes_per_token


@pytest.mark.parametrize("options", [{}, {"first": 3}, {"recent": 5}, {"first": 3, "recent": 5}, {"recent": 12}])
def test_reads_are_counted_by_the_rule_of_positions(model, ids, options):
    row = compare(model, ids, caches(model, "k4v4", **options), chunk=16)[1]
    first, recent = options.get("first", 0), options.get("recent", 0)
    windows = [layer.window for layer in AuraCache(model.config, "k4v4").compressed]
    coded = seen = 0
    tokens = []
    for window in windows:
        read = set()
        for p in range(COUNT):
            for t in range(max(0, p - window + 1) if window else 0, p + 1):
                seen += 1
                if t >= first and t <= p - recent:
                    coded += 1
                    read.add(t)
        tokens.append(len(read))
    assert row.reads_from_codes == coded / seen
    assert row.tokens_from_codes == min(tokens)


def test_reads_need_the_tokens_to_be_there(model):
    with pytest.raises(InputError, match="must hold 5 tokens"):
        reads_of(AuraCache(model.config, "k4v4"), 0, 5)
    assert reads_of(DynamicCache(config=model.config), 0, 5) == (0, 0, 0)


@torch.no_grad()
def test_bytes_are_those_of_the_tensors(model, ids):
    dynamic = DynamicCache(config=model.config)
    model(ids, past_key_values=dynamic)
    held = {x.data_ptr(): x.untyped_storage().nbytes() for layer in dynamic.layers for x in (layer.keys, layer.values)}
    assert sum(held.values()) <= bytes_of(dynamic) <= sum(held.values()) + 16  # a sliding layer counts in a tensor
    cache = AuraCache(model.config, "k4v4", first=2)
    model.set_attn_implementation("aurakv")
    model(ids, past_key_values=cache)
    model.set_attn_implementation("sdpa")
    small = 16 * len(tensors_of(cache)) + 4 * COUNT  # counters, and the mask that was read last
    assert cache.bytes_held <= bytes_of(cache) <= cache.bytes_held + small
    row = compare(model, ids, {"x": lambda: AuraCache(model.config, "k4v4", first=2)}, chunk=COUNT)[1]
    assert row.bytes_per_token == bytes_of(cache) / COUNT
    assert bytes_of(SimpleNamespace(simulated_bytes=12)) == 12


def test_wrong_input(model, ids):
    with pytest.raises(InputError, match="at least 2 tokens"):
        compare(model, ids[:, :1], {})
    with pytest.raises(InputError, match="chunk and every must be at least 1"):
        compare(model, ids, {}, chunk=0)
    with pytest.raises(InputError, match="stands for the model itself"):
        compare(model, ids, {"uncompressed": dict})


class Words:
    """A tokenizer with a token per word; 7 begins a text if it is asked to."""

    bos_token_id = 7

    def __init__(self, begins):
        self.begins = begins

    def __call__(self, text, add_special_tokens=True):
        ids = [10 + len(word) for word in text.split()]
        return SimpleNamespace(input_ids=[7, *ids] if self.begins and add_special_tokens else ids)


def test_text_begins_as_the_model_wants(tmp_path):
    llama, gemma = transformers.LlamaConfig(**BASE), transformers.Gemma3TextConfig(**BASE, **WINDOWS)
    assert ids_of("a bc def", Words(False), llama).tolist() == [[11, 12, 13]]
    assert ids_of("a bc def", Words(True), llama, 3).tolist() == [[7, 11, 12]]
    assert ids_of("a bc def", Words(False), gemma).tolist() == [[7, 11, 12, 13]]
    with pytest.raises(InputError, match="this text has 3 tokens"):
        ids_of("a bc def", Words(False), llama, 4)
    assert len(builtin().split()) > 4000
    with pytest.raises(FileError, match="cannot be read"):
        read(tmp_path / "none.txt")
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    with pytest.raises(FileError, match="must be UTF-8 text, got byte 0xff"):
        read(tmp_path / "bad.txt")
    (tmp_path / "good.txt").write_bytes(b"a\r\nb")
    assert read(tmp_path / "good.txt") == "a\nb"
