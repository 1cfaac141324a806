"""Names of formats, as far as they can be told without torch: `Format.parse` reads the rest."""

from __future__ import annotations

import re

from ..errors import InputError, short
from .levels import CODE_BITS

BITS = (*CODE_BITS, 16)
PLAIN = "plain:"  # before a format: codes alone
RECENT = "recent"  # and a number and a colon before a format or policy: so many recent tokens are uncompressed
_NAME = r"k([1-9]\d?)(?:((?::[^:/]+)+)/|/?)v([1-9]\d?)((?::[^:/]+)*)"  # options of the key end with a slash


def recent_and_name(given: str) -> tuple[int | None, str]:
    """Of recent16:k3v3 both parts; None: nothing is said of recent tokens."""
    if re.match(rf"({PLAIN})?{RECENT}[^:/]*:", given, re.IGNORECASE) is None:
        return None, given
    match = re.fullmatch(rf"{RECENT}(\d{{1,6}}):(.+)", given, re.ASCII)
    if match is None or match[2].lower().startswith(RECENT):
        raise InputError(
            f"{RECENT}<n>: needs a whole number and then a format or policy, as in {RECENT}16:k4v4 or"
            f" {RECENT}16:{PLAIN}k4v4, got {short(given)}"
        )
    recent, name = int(match[1]), match[2]
    if recent and re.fullmatch(r"(plain:)?k16(:\w+/|/)?v16(:\w+)?", name):
        raise InputError(f"{RECENT}<n>: has no meaning for k16v16, which stores every token uncompressed")
    return recent, name


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
