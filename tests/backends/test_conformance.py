"""The conformance suite on every backend of this machine, and proof that it can fail."""

import pytest

from aurakv import backends
from aurakv.testing import BROKEN, CASES, covering_set, run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, backend, device):
    run(case, backend, device)
    if backends.fast_error(backend):
        run(case, backend, device, precision="float32")


@pytest.mark.full
@pytest.mark.parametrize("case", covering_set(), ids=lambda case: case.name)
def test_covering_set(case, backend, device):
    run(case, backend, device)
    if backends.fast_error(backend):
        run(case, backend, device, precision="float32")


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_broken_backends_fail(broken):
    backends.register(broken)
    with pytest.raises(AssertionError):
        for case in CASES:
            run(case, broken.name)


def test_case_names_are_unique():
    names = [case.name for case in (*CASES, *covering_set())]
    assert len(names) == len(set(names))
    assert len(CASES) >= 100
