"""Caches under torch.compile(fullgraph=True): the results of eager steps, one graph however long sequences grow."""

import copy

import pytest
import torch

import aurakv as kv
from aurakv.errors import CapacityError, InputError
from aurakv.storage.uncompressed import Uncompressed

FORMAT = kv.Format.parse("k4v4", 64)
CACHES = {
    "contiguous": lambda: kv.KVCache.contiguous(FORMAT, 2, 2),
    "ring": lambda: kv.KVCache.ring(FORMAT, 2, 2, window=24, sinks=3, page_size=16),
    "paged": lambda: kv.KVCache.paged(kv.PagePool(FORMAT, 20, 16, 2), 2),
    "first": lambda: kv.KVCache.contiguous(FORMAT, 2, 2, uncompressed=Uncompressed(4, 0, torch.float32)),
    "recent": lambda: kv.KVCache.contiguous(FORMAT, 2, 2, uncompressed=Uncompressed(2, 8, torch.float32)),
    "reference": lambda: kv.KVCache.contiguous(FORMAT, 2, 2, backend="reference"),
}


def new(tokens: int = 2) -> tuple[torch.Tensor, ...]:
    return torch.randn(tokens, 4, 64), torch.randn(tokens, 2, 64), torch.randn(tokens, 2, 64)


def compile_counted(function):
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=count), graphs


@pytest.mark.parametrize("kind", CACHES)
def test_steps_equal_eager_ones_in_one_graph(kind):
    torch.manual_seed(0)
    ours, eager = CACHES[kind](), CACHES[kind]()
    prompt = new(30)
    for cache in (ours, eager):
        cache.step(*prompt, [0, 12, 30])
        cache.reserve(60)
    step, graphs = compile_counted(lambda q, k, v: ours.step(q, k, v))
    for _ in range(50):
        one = new()
        got, wanted = step(*one), eager.step(*one)
        torch.testing.assert_close(got.out, wanted.out)
        torch.testing.assert_close(got.lse, wanted.lse)
    assert len(graphs) == 1
    assert ours.lengths == eager.lengths == [62, 68]
    torch.testing.assert_close(ours.step(*one).out, eager.step(*one).out)  # and eager ones after them


def test_append_and_attend_in_one_graph():
    torch.manual_seed(1)
    ours, eager = CACHES["contiguous"](), CACHES["contiguous"]()
    ours.reserve(40)

    def both(q, k, v):
        ours.append(k, v)
        return ours.attend(q, scoring=scoring, sink_logits=logits).out

    scoring, logits = kv.Scoring(window=9, softcap=3.0), torch.randn(4)
    step, graphs = compile_counted(both)
    for _ in range(30):
        q, k, v = new()
        got = step(q, k, v)
        eager.append(k, v)
        torch.testing.assert_close(got, eager.attend(q, scoring=scoring, sink_logits=logits).out)
    assert len(graphs) == 1


def test_what_only_the_host_can_do_is_refused():
    full = kv.KVCache.contiguous(FORMAT, 2, 2)
    full.reserve(64)
    step, _ = compile_counted(lambda q, k, v: full.step(q, k, v).out)
    for _ in range(64):
        step(*new())
    with pytest.raises(CapacityError, match="reserve"):
        step(*new())
    assert full.lengths == [64, 64]
    full.reserve(1)
    step(*new())
    full.fork(0, 1)
    before = full.pages.data.clone()
    with pytest.raises(InputError, match="pages that sequences share"):
        step(*new())
    assert torch.equal(full.pages.data, before)
    eager = copy.deepcopy(full)
    full.reserve(20)  # copies what the two share
    for _ in range(20):
        arguments = new()
        torch.testing.assert_close(step(*arguments), eager.step(*arguments).out)
    first = CACHES["first"]()
    first.reserve(10)
    step, _ = compile_counted(lambda q, k, v: first.step(q, k, v).out)
    with pytest.raises(InputError, match="first tokens that stay uncompressed"):
        step(*new())
    ring = CACHES["ring"]()
    ring.reserve(10)
    many, _ = compile_counted(lambda q, k, v, starts: ring.step(q, k, v, starts).out)
    with pytest.raises(InputError, match="at most 16 tokens"):
        many(*new(40), torch.tensor([0, 20, 40]))
