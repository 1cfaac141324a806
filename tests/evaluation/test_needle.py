"""Needles stand where they should, and are found when the model sees them."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from aurakv.errors import FileError, InputError  # noqa: E402
from aurakv.evaluation import builtin  # noqa: E402
from aurakv.evaluation.needle import DEPTHS, haystack, search  # noqa: E402
from aurakv.evaluation.results import Results, model_key, text_key  # noqa: E402
from aurakv.hf import AuraCache  # noqa: E402
from tests.hf.small_models import made  # noqa: E402

CONFIG = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def tokenizer():
    level = tokenizers.pre_tokenizers.ByteLevel
    vocabulary = {text: n for n, text in enumerate(["<end>", *sorted(level.alphabet())])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = level(add_prefix_space=False), tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()


def test_haystack(tokenizer, model):
    ids, questions = haystack(tokenizer, model.config, builtin(), 2000, DEPTHS, seed=3)
    assert ids.shape == (1, 2000)
    text = tokenizer.decode(ids[0])
    assert [question.depth for question in questions] == list(DEPTHS)
    places = []
    for question in questions:
        cue, answer = (tokenizer.decode(x) for x in question.ids[0].split([question.ids.shape[1] - 6, 6]))
        assert question.answer == 6  # a space and five digits
        assert cue.startswith("\nThe password of the ")
        assert answer[0] == " "
        assert answer[1:].isdigit()
        assert text.count(cue + answer + ".\n") == 1
        places.append(text.index(cue + answer) / len(text))
    assert places == sorted(places)
    assert all(abs(place - depth) < 0.06 for place, depth in zip(places, DEPTHS, strict=True))
    hay = text
    for question in questions:
        hay = hay.replace(tokenizer.decode(question.ids[0]) + ".\n", "")
    assert builtin().startswith(hay)
    again, _ = haystack(tokenizer, model.config, builtin(), 2000, DEPTHS, seed=4)
    assert not torch.equal(ids, again)


def test_wrong_haystacks(tokenizer, model):
    for depths in ([], [2.0], [0.5] * 11):
        with pytest.raises(InputError, match="needles need from 1 to 10 depths"):
            haystack(tokenizer, model.config, builtin(), 2000, depths, 0)
    with pytest.raises(InputError, match="needles need a text of at least"):
        haystack(tokenizer, model.config, builtin(), 100, DEPTHS, 0)


class Copier(torch.nn.Module):
    """Finds the last place where the last eight tokens stood before, and predicts what came there: needs the cache."""

    def __init__(self, model):
        super().__init__()
        self.inner, self.config, self.seen, self.device = model, model.config, {}, torch.device("cpu")

    def set_attn_implementation(self, name):
        self.inner.set_attn_implementation(name)

    def forward(self, ids, past_key_values, logits_to_keep=0, **options):
        before = past_key_values.get_seq_length()
        self.inner(ids, past_key_values=past_key_values, use_cache=True)
        text = self.seen["text"] = [*self.seen.get("text", [])[:before], *ids[0].tolist()]
        logits = torch.zeros(1, ids.shape[1], 257)
        for at in range(before, len(text)):
            tail = text[max(0, at - 20) : at + 1]
            for lo in range(at - len(tail), -1, -1):
                if text[lo : lo + len(tail)] == tail:
                    logits[0, at - before, text[lo + len(tail)]] = 9
                    break
        return type("Output", (), {"logits": logits})()


def test_a_model_that_copies_finds_all_and_a_random_one_none(tokenizer, model):
    told = []
    caches = {"k4v4": lambda: AuraCache(model.config, "k4v4")}
    options = {"tokens": 600, "chunk": 128, "progress": lambda *at: told.append(at)}
    rows = search(Copier(model), tokenizer, builtin(), caches, **options)
    assert [row.name for row in rows] == ["uncompressed"] * 5 + ["k4v4"] * 5
    assert all(row.found and row.nll < 0.1 for row in rows)
    assert [row.depth for row in rows] == [*DEPTHS, *DEPTHS]
    coded = AuraCache(model.config, "k4v4").compressed[0].context.options.first
    assert {row.tokens_from_codes for row in rows[5:]} == {600 - coded}
    assert [at for at in told if at[0] in (1, 2)] == [(1, 2), (2, 2)]
    assert len(told) == 2 * 5 * 3, "five forward passes for each cache, through two layers and the head"
    before = model.config._attn_implementation
    rows = search(model, tokenizer, builtin(), caches, **options)
    assert not any(row.found for row in rows)
    assert all(row.nll > 0.5 for row in rows)
    assert model.config._attn_implementation == before


def test_results_are_found_again(tmp_path):
    path = tmp_path / "results.json"
    results = Results(path)
    results.facts = {"model": "m"}
    results.add({"text": "a", "format": "k4v4"}, {"kl": 1.0})
    results.add({"text": "a", "format": "k3v3"}, {"kl": 2.0})
    results.add({"text": "a", "format": "k4v4"}, {"kl": 3.0})
    results.save()
    again = Results(path)
    assert again.facts == {"model": "m"}
    assert again.find({"text": "a", "format": "k4v4"}) == {"kl": 3.0}
    assert again.find({"text": "b", "format": "k4v4"}) is None
    assert len(again.entries) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
    Results().save()  # nowhere
    assert text_key(torch.tensor([[1, 2]])) != text_key(torch.tensor([[12]]))
    for text, sentence in (
        ("{", "must be a JSON file of aurakv-evaluation"),
        ('{"kind": "x"}', "must be a file of"),
        ("[]", "must be a f"),
    ):
        path.write_text(text)
        with pytest.raises(FileError, match=sentence):
            Results(path)
    Results(path := tmp_path / "other.json", "another-kind").save()
    with pytest.raises(FileError, match="must be a file of aurakv-evaluation version 1"):
        Results(path)
    lost = Results(tmp_path / "none" / "results.json")
    with pytest.raises(FileError, match=r"results\.json cannot be written: No such file"):
        lost.save()


def test_a_model_is_known_by_its_config_and_every_weight():
    _, ours = made("llama")
    assert model_key(ours) == model_key(copy.deepcopy(ours))
    for change in (
        lambda model: model.get_input_embeddings().weight.data[-1, -1].add_(1e-3),
        lambda model: setattr(model.config, "rope_scaling", {"factor": 2.0}),
    ):
        other = copy.deepcopy(ours)
        change(other)
        assert model_key(other) != model_key(ours)
    elsewhere = copy.deepcopy(ours)
    elsewhere.config._name_or_path = "another/folder"
    assert model_key(elsewhere) == model_key(ours)
    assert model_key(copy.deepcopy(ours).bfloat16()) != model_key(ours)
