"""What compression does to a model: perplexity, KL divergence and choices on real text, and facts found again."""

from ..calibration.texts import builtin, ids_of, read
from .measure import Row, compare

__all__ = ["Row", "builtin", "compare", "ids_of", "read"]
