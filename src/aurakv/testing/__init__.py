"""Conformance: named cases, an independent oracle, and deliberately broken backends that the cases must catch.

for case in CASES:
    run(case, backend="mine", device="cpu")   # AssertionError says what differs and by how much
"""

from .broken import BROKEN
from .cases import CASES, Case, covering_set
from .conformance import check_codes, check_partial, poisoned, run

__all__ = ["BROKEN", "CASES", "Case", "check_codes", "check_partial", "covering_set", "poisoned", "run"]
