"""Names of formats, as far as they can be told without torch: `Format.parse` reads the rest."""

from __future__ import annotations

import re

from ..errors import InputError, short
from .levels import CODE_BITS

BITS = (*CODE_BITS, 16)
_NAME = r"k([1-9]\d?)(?:((?::[^:/]+)+)/|/?)v([1-9]\d?)((?::[^:/]+)*)"  # options of the key end with a slash


RECENT = "recent"  # and a number and a colon before a format or policy: so many recent tokens are uncompressed


def recent_and_name(given: str) -> tuple[int | None, str]:
    """Of recent16:k3v3 both parts; None: nothing is said of recent tokens."""
    match = re.fullmatch(rf"{RECENT}(\d{{1,6}}):(.+)", given, re.ASCII)
    return (int(match[1]), match[2]) if match else (None, given)


def parts(name: object) -> tuple[str, str, str, str]:
    """Bits and options of the key, bits and options of the value, as they are written."""
    match = re.fullmatch(_NAME, name, re.ASCII) if isinstance(name, str) else None
    if match is None:
        raise InputError(
            f"a format name is k<bits>v<bits> with bits in {list(BITS)}, and options as in k4:lsq/v4:f32, where a"
            f" slash ends those of the key, got {short(name)}"
        )
    key, key_options, value, value_options = match.groups("")
    return key, key_options, value, value_options
