"""Why certificates do not count for a model that is here: expired, of another device, or with counts that are not enough."""

from __future__ import annotations

from collections.abc import Sequence

from .certificates import Certificate, Identity
from .requirements import Gate, refusals

OF_THE_FILES = ("weights", "settings", "tokenizer")
OF_THE_DEVICE = ("device", "simulated", "device_name")

CHANGES = {
    "weights": "the weights changed",
    "settings": "its config.json changed",
    "tokenizer": "the tokenizer changed",
    "torch": "torch was {before.torch} and is {now.torch}",
    "transformers": "transformers was {before.transformers} and is {now.transformers}",
}
"""What makes a certificate expire, and how that is said."""


def changes(before: Identity, now: Identity) -> list[str]:
    """Return the names of what differs between two identities: of files, versions and the device."""
    return [name for name in (*CHANGES, *OF_THE_DEVICE) if getattr(before, name) != getattr(now, name)]


def why_none(certificates: Sequence[Certificate], identity: Identity) -> str:
    """Return why none of the certificates of a model counts for it as it is here, in words; empty where none says why.

    Args:
        certificates: Those of the model in its type that counted somewhere, at some time.
        identity: The model as it is here.
    """
    real = [one for one in certificates if identity.simulated or not one.identity.simulated]
    here = [one for one in real if not {*changes(one.identity, identity)} & {*OF_THE_DEVICE}]
    if here:
        nearest = min(here, key=lambda one: (len(changes(one.identity, identity)), one.date))
        return f"its certificate expired: {expired_because(nearest, identity)}"
    same_files = [one.identity for one in real if not {*changes(one.identity, identity)} & {*OF_THE_FILES}]
    places = sorted({other_device(one, identity) for one in same_files})
    return f"it was validated on {' and '.join(places)} only" if places else ""


def other_device(before: Identity, now: Identity) -> str:
    """Return what another device is called: its kind, or where that is the same, its own name."""
    return before.device_name if before.shown_device == now.shown_device else before.shown_device


def expired_because(certificate: Certificate, identity: Identity) -> str:
    """Return which files and versions changed since a certificate was made, in words; empty where none did.

    Example:
        >>> from .certificates import Evidence
        >>> before = Identity("bundled", "w", "s", "t", "bfloat16", "mps", "Apple M2 Pro", "2.13.0", "5.17.0", False)
        >>> after = Identity("bundled", "x", "s", "t", "bfloat16", "mps", "Apple M2 Pro", "2.14.0", "5.17.0", False)
        >>> evidence = Evidence(20, "f", 900, 0, 60, 0, 0, 0, 0, 12, None, None, 1.4)
        >>> expired_because(Certificate(before, evidence, "2026-03-01", {}), after)
        'the weights changed, and torch was 2.13.0 and is 2.14.0'
    """
    before = certificate.identity
    differing = [name for name in changes(before, identity) if name in CHANGES]
    return in_one_sentence([CHANGES[name].format(before=before, now=identity) for name in differing])


def refused_because(certificate: Certificate) -> str:
    """Return why the counts of a certificate are not enough for what is asked for now, in words; empty where they are."""
    found = refusals(certificate.evidence, certificate.identity.dtype, Gate())
    return in_one_sentence([f"{one.reason[0].lower()}{one.reason[1:]}".removesuffix(".") for one in found])


def in_one_sentence(said: Sequence[str]) -> str:
    """Return several things as one.

    Example:
        >>> in_one_sentence(["one", "two", "three"]), in_one_sentence([])
        ('one, two, and three', '')
    """
    return ", ".join(said[:-1]) + (", and " if len(said) > 1 else "") + said[-1] if said else ""
