"""Commands as tests call them."""

import json

import pytest
import torch

from aurakv import cli

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def call(capsys):
    """Run a command: (exit code, stdout, stderr)."""

    def run(*argv):
        try:
            code = cli.main([str(word) for word in argv])
        except SystemExit as stop:  # argparse
            code = stop.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def refused(call):
    """The one sentence with which a command refuses."""

    def run(*argv):
        code, out, err = call(*argv)
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith(("aurakv: ", "aurakv "))
        return line

    return run


@pytest.fixture
def answer(call):
    """The JSON document that a command prints."""

    def run(*argv):
        code, out, err = call(*argv, "--json")
        assert code == 0, err
        return json.loads(out)

    return run


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The folder of a model like any that a user has."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("small")
    vocabulary = {text: n for n, text in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=0, bos_token_id=None, dtype="float32",
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
