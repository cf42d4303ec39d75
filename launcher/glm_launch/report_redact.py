"""Takes secrets and, unless told otherwise, addresses out of text that leaves the machine.

Pure. What must stay true: a secret that is known is removed wherever it stands, also percent-
encoded or in JSON; what looks like a token is removed even if nobody knows it; an address gets the
same alias everywhere, so that a report can still be followed. Loopback and unspecified addresses
stay.
"""

from __future__ import annotations

import ipaddress
import json
import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass, field

HIDDEN = "(hidden)"
SHORTEST = 4
TOKENS = tuple(re.compile(pattern) for pattern in (
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\bgh[pousr]_[A-Za-z0-9]{16,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bsk-[A-Za-z0-9_-]{16,}",
    r"\bnvapi-[A-Za-z0-9_-]{16,}",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)",
))  # fmt: skip
NAMED = (
    re.compile(r"(?i)(\bauthorization\b[\"']?\s*[:=]\s*[\"']?(?:bearer|basic)\s+)[^\s\"',;]+"),
    re.compile(r"(?i)(\bbearer\s+)[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(
        r"(?i)((?:--|\b)[\w-]*(?:api[-_]?key|access[-_]?key|secret|password|passwd|[-_]token|^token)"
        r"[\"']?(?:\s*[:=]\s*|\s+)[\"']?)(?!\(hidden\))[^\s\"',;&}]+"
    ),
    re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+(?=@)"),
)
_V4 = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})(?![\w.]*\d*\.\d)")
_V6 = re.compile(r"(?<![\w:.])([0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7})(?![\w:])")
_MAC = re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b")


@dataclass
class Redactor:
    """`names` are host and user names to replace, by what stands for them."""

    secrets: Iterable[str] = ()
    names: dict[str, str] = field(default_factory=dict)
    keep_addresses: bool = False
    aliases: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        forms = {form for secret in self.secrets for form in forms_of(secret)}
        self._known = sorted(forms, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for known in self._known:
            text = text.replace(known, HIDDEN)
        for pattern in TOKENS:
            text = re.sub(pattern.pattern, HIDDEN, text, flags=re.DOTALL)
        for pattern in NAMED:
            text = pattern.sub(rf"\1{HIDDEN}", text)
        if not self.keep_addresses:
            text = _MAC.sub("(mac)", text)
            text = _V4.sub(self._alias, _V6.sub(self._alias, text))
            for name, alias in self.names.items():
                text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", alias, text)
        return text

    def _alias(self, match: re.Match[str]) -> str:
        try:
            address = ipaddress.ip_address(match[1])
        except ValueError:
            return match[0]
        if address.is_loopback or address.is_unspecified:
            return match[0]
        return self.aliases.setdefault(str(address), f"address-{len(self.aliases) + 1}")


def forms_of(secret: str) -> set[str]:
    """The ways in which a secret may stand in a text; too short ones cannot be told apart."""
    if len(secret) < SHORTEST:
        return set()
    quoted = {urllib.parse.quote(secret, safe=""), urllib.parse.quote_plus(secret)}
    return {secret, json.dumps(secret)[1:-1], *quoted}
