"""What operations on pages refuse, and with which sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import aurakv as kv
from aurakv import backends
from aurakv.attention import ops, torch_ops
from aurakv.errors import InputError
from tests.helpers.refusals import HEADS, META, case, check, codes, queries, ramp, tokens, with_grad


def attend(w: SimpleNamespace, n: int = 2, **changes: object) -> kv.Partial:
    return kv.attend(**{"q": queries(n), "pages": w.paged.pages, **changes})


PAGES = [
    case("q ndim", lambda w: attend(w, q=ramp(2, 64)), "q must be", "[tokens, heads, 16]", "[2, 64]"),
    case("q heads", lambda w: attend(w, q=ramp(2, 5, 16)), "multiple of 2 KV heads", "[2, 5, 16]"),
    case("q dim", lambda w: attend(w, q=ramp(2, 4, 32)), "[tokens, heads, 16]", "[2, 4, 32]"),
    case("q dtype", lambda w: attend(w, q=queries(2).long()), "q must be float32", "int64"),
    case("q device", lambda w: attend(w, q=queries(2).to(META)), "q must be on cpu", "meta"),
    case("q grad", lambda w: attend(w, q=with_grad(queries(2))), "q requires grad", "q.detach()"),
    case("q none", lambda w: attend(w, q=None), "q must be a tensor", "NoneType"),
    case("no starts", lambda w: attend(w, 3), "3 tokens for 2 sequences need starts"),
    case("starts short", lambda w: attend(w, starts=[0, 2]), "starts", "3 numbers", "[0, 2]"),
    case("starts end", lambda w: attend(w, starts=[0, 1, 1]), "from 0 to 2 tokens", "[0, 1, 1]"),
    case("starts begin", lambda w: attend(w, starts=[1, 1, 2]), "from 0 to 2 tokens", "[1, 1, 2]"),
    case("starts falling", lambda w: attend(w, starts=[0, 3, 2]), "rise", "[0, 3, 2]"),
    case("starts tensor", lambda w: attend(w, starts=torch.tensor([0, 5, 2])), "rise", "[0, 5, 2]"),
    case("starts dtype", lambda w: attend(w, starts=torch.tensor([0.0, 1.0, 2.0])), "starts must be int32", "float32"),
    case("starts shape", lambda w: attend(w, starts=torch.tensor([[0, 1, 2]])), "[3]", "[1, 3]"),
    case("starts device", lambda w: attend(w, starts=torch.zeros(3, dtype=torch.int32, device=META)), "cpu", "meta"),
    case("ends count", lambda w: attend(w, ends=[1]), "ends must be 2 numbers", "[1]"),
    case("ends float", lambda w: attend(w, ends=[1.5, 2]), "ends must be 2 whole numbers", "1.5"),
    case("ends shape", lambda w: attend(w, ends=torch.tensor([1])), "ends must be int32 or int64 [2]", "[1]"),
    case("ends dtype", lambda w: attend(w, ends=torch.tensor([1.0, 2.0])), "ends", "int32", "float32"),
    case("ends negative", lambda w: attend(w, ends=[-1, 2]), "ends", "0", "-1"),
    case("ends huge", lambda w: attend(w, ends=[2**40, 2]), "ends", str(2**40)),
    case("ends huge tensor", lambda w: attend(w, ends=torch.tensor([2**32 + 5, 2])), "ends", str(2**32 + 5)),
    case("sinks shape", lambda w: attend(w, sink_logits=ramp(2)), "sink_logits must be [4]", "[2]"),
    case("sinks dtype", lambda w: attend(w, sink_logits=torch.ones(4).int()), "sink_logits", "float32", "int32"),
    case("sinks device", lambda w: attend(w, sink_logits=ramp(4).to(META)), "sink_logits", "cpu", "meta"),
    case("sinks grad", lambda w: attend(w, sink_logits=with_grad(ramp(4))), "sink_logits requires grad"),
    case("precision that is long", lambda w: attend(w, precision="half" * 9999), "precision", "'halfhalf", "…"),
    case("starts that are many", lambda w: attend(w, starts=[0] * 9999), "starts must rise", "[0, 0, 0", "…"),
    case("sparse queries", lambda w: w.paged.attend(queries(2).to_sparse()), "q must be a dense tensor", "sparse_coo"),
    case("precision", lambda w: attend(w, precision="half"), "precision", "['fast', 'float32']", "'half'"),
    case("splits 0", lambda w: attend(w, splits=0), "splits", "at least 1", "0"),
    case("splits negative", lambda w: attend(w, splits=-4), "splits", "-4"),
    case("splits float", lambda w: attend(w, splits=1.5), "splits", "1.5"),
    case("workspace dtype", lambda w: attend(w, workspace=ramp(8)), "workspace", "uint8", "float32"),
    case(
        "workspace device",
        lambda w: attend(w, workspace=torch.zeros(8, dtype=torch.uint8, device=META)),
        *("workspace", "cpu", "meta"),
    ),
    case(
        "workspace strides",
        lambda w: attend(w, workspace=torch.zeros(8, dtype=torch.uint8)[::2]),
        *("workspace", "contiguous"),
    ),
    case("scoring", lambda w: attend(w, scoring={}), "scoring must be a Scoring", "{}"),
    case("starts bool", lambda w: attend(w, starts=[False, True, 2]), "starts must be 3 whole numbers", "True"),
    case("ends bool", lambda w: attend(w, ends=[True, 2]), "ends must be 2 whole numbers", "True"),
    case("splits bool", lambda w: attend(w, splits=True), "splits", "True"),
    case("backend", lambda w: attend(w, backend="fast"), "backend", "reference", "'fast'"),
    case("append backend", lambda w: kv.append(w.ring.pages, *tokens(2), backend="?"), "backend", "reference", "'?'"),
    case("append heads", lambda w: kv.append(w.ring.pages, ramp(2, 3, 16), tokens(2)[1]), "k must be [tokens, 2, 16]"),
    case("append starts", lambda w: kv.append(w.ring.pages, *tokens(2), [0, 0, 1]), "from 0 to 2 tokens", "[0, 0, 1]"),
    case("append codes", lambda w: ops.append_codes(w.ring.pages, *codes(2), [0, 1]), "3 numbers", "[0, 1]"),
    case(
        "compiled starts",
        lambda w: torch_ops.append(w.ring.pages, *tokens(2), [0, 1, 2], None),
        *("torch.compile", "starts must be a tensor", "list"),
    ),
    case(
        "compiled ends",
        lambda w: torch_ops.attend(
            queries(2), w.ring.pages, None, kv.Scoring(), [1, 2], None, None, "fast", None, False, None
        ),
        *("torch.compile", "ends must be a tensor", "list"),
    ),
]


@pytest.mark.parametrize(("call", "error", "words"), PAGES)
def test_refused(world, call, error, words):
    check(world, call, error, *words)


def test_a_workspace_must_be_large_enough(world, monkeypatch):
    """The reference needs none, so this asks for a backend that does."""
    monkeypatch.setattr(backends, "_registered", {})
    reference = backends._load("reference")
    needy = SimpleNamespace(**{name: getattr(reference, name) for name in dir(reference) if name[0] != "_"})
    needy.name, needy.workspace_bytes = "needy", lambda pages, tokens, heads, splits: 1000 * tokens
    backends.register(needy)
    assert ops.attend_workspace(world.paged.pages, 2, HEADS, backend="needy") == 2000

    def call(w, size):
        return attend(w, workspace=torch.empty(size, dtype=torch.uint8), backend="needy")

    check(world, lambda w: call(w, 1999), InputError, "workspace", "at least 2000 bytes", "with 1999")
    assert call(world, 2000).out.isfinite().all()
