"""For `pytest -p`: the whole process pretends to have an Apple GPU (pretended_mps.py)."""

from tests.helpers import pretended_mps

_kept = pretended_mps.pretending()  # a generator that is collected would end
_kept.__enter__()
