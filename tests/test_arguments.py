"""Devices and dtypes that come from outside."""

import pytest
import torch

import aurakv as kv
from aurakv.arguments import device_of, usable_device
from aurakv.errors import InputError


@pytest.mark.parametrize("given", ["banana", "", "cpu:x", 3.5, None, True, torch.ones(2)])
def test_what_is_no_device(given):
    for call in (device_of, usable_device, lambda device: kv.why_not("native", device=device)):
        with pytest.raises(InputError, match=r"^device must be a torch.device or the name of one, such as") as info:
            call(given)
        assert "\n" not in str(info.value)


def test_devices():
    assert device_of("cuda:1") == torch.device("cuda:1")
    assert usable_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there():
    with pytest.raises(InputError, match=r"^device must be a device that torch can use here, got 'cuda': ") as info:
        kv.KVCache.contiguous(kv.Format.parse("k4v4", 64), 1, 1, device="cuda")
    assert "\n" not in str(info.value)


def test_a_dtype_that_nothing_computes_in():
    with pytest.raises(InputError, match=r"^dtype must be one of floating-point numbers, got torch.int32$"):
        kv.why_not("reference", dtype=torch.int32)
