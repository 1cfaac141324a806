"""vLLM with aurakv pages: `register` is what vLLM's entry point calls. See docs/serving.md."""

from __future__ import annotations

import warnings

VERSIONS = ("0.31", "0.32")  # of vLLM, that `adapter` is written for


def register() -> None:
    """Make the switch `additional_config={"aurakv": …}` known to vLLM; without it nothing changes."""
    try:
        from . import adapter
    except ImportError as error:
        warnings.warn(
            f"aurakv works with vLLM {' and '.join(VERSIONS)} and is off: {error}", RuntimeWarning, stacklevel=2
        )
    else:
        adapter.install()
