"""What compression does to a model: perplexity, KL divergence and choices on real text, and facts found again."""

from .measure import Row, compare
from .texts import builtin, ids_of, read

__all__ = ["Row", "builtin", "compare", "ids_of", "read"]
