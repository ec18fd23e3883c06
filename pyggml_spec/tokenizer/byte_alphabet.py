"""The printable spelling that byte-level BPE vocabularies give to the 256 bytes.

Printable Latin-1 characters stand for themselves, the remaining bytes, in order, for the characters from U+0100 on
(Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2; a space becomes U+0120).
"""

from __future__ import annotations

_SELF_SPELLED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]


def byte_of_character() -> dict[str, int]:
    """For each of the 256 characters of the alphabet, the byte it spells."""
    others = [byte for byte in range(256) if byte not in set(_SELF_SPELLED)]
    spelled = {chr(byte): byte for byte in _SELF_SPELLED}
    return spelled | {chr(0x100 + number): byte for number, byte in enumerate(others)}
