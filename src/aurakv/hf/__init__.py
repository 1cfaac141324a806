"""Integration with transformers: a compressed cache for `past_key_values=` and the attention function that reads it.

Importing changes nothing; `register` or `attach` make the attention function known to transformers.
"""

from ..errors import needing

with needing("transformers", "hf"):
    from .attention import register
    from .cache import AuraCache, attach

__all__ = ["AuraCache", "attach", "register"]
