"""A width that nobody has kernels for: each backend serves it or says that it does not, and none guesses."""

import pytest
import torch

import aurakv as kv
from aurakv.attention import ops
from aurakv.errors import BackendError
from aurakv.format import codec, levels

ADDED = 7


@pytest.fixture
def seven(monkeypatch):
    monkeypatch.setattr(levels, "CODE_BITS", (*levels.CODE_BITS, ADDED))
    monkeypatch.setattr(codec, "BITS", (*codec.BITS, ADDED))
    return kv.Format.parse(f"k{ADDED}v{ADDED}", 64)


def test_a_width_is_refused_until_it_is_in_the_list():
    with pytest.raises(ValueError, match="7"):
        kv.Format.parse("k7v4", 64)


def test_added_width(seven, backend, device):
    x = torch.randn(300, 2, 64, device=device)
    reason = kv.why_not(backend, seven, device)
    if reason is None:
        codes = ops.encode(x, seven.key, backend=backend)
        error = (ops.decode(codes, seven.key, backend=backend) - x).norm() / x.norm()
        assert float(error) < 0.02
        return
    assert f"{ADDED} bits" in reason
    cache = kv.KVCache.contiguous(seven, 1, 2, device=device)
    with pytest.raises(BackendError, match=f"{ADDED} bits"):
        ops.encode(x, seven.key, backend=backend)
    with pytest.raises(BackendError, match=f"{ADDED} bits"):
        ops.append(cache.pages, x, x, backend=backend)


def test_the_choice_falls_on_a_backend_that_serves_it(seven):
    x = torch.randn(100, 2, 64)
    cache = kv.KVCache.contiguous(seven, 1, 2)
    cache.append(x, x)
    assert cache.attend(torch.randn(1, 4, 64)).out.isfinite().all()
