"""Prompts that the tests of the vLLM plugin share, and the length of the contexts that they serve."""

from pathlib import Path

LENGTH = 2048
TEXT = (Path(__file__).parents[1] / "LICENSE").read_text("utf-8")  # does not change
BEGINNINGS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    TEXT[:2500],
    TEXT[3000:6000],
)
