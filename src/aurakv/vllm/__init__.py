"""vLLM with aurakv pages: `register` is what vLLM's entry point calls. See docs/serving.md."""

from __future__ import annotations


def register() -> None:
    """Make the switch `additional_config={"aurakv": …}` known to vLLM; without it nothing changes."""
    from . import adapter

    adapter.install()
