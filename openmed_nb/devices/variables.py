"""The environment variables that may be shown: an allow list, with everything secret masked."""

from __future__ import annotations

import re
from collections.abc import Mapping

SHOWN = (
    "OPENMED_TORCH_DEVICE",
    "OPENMED_DEVICE",
    "ACCELERATE_USE_CPU",
    "CUDA_VISIBLE_DEVICES",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)

SECRET_NAME = re.compile(r"key|token|secret|passw|pwd|credential|auth", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"(?P<scheme>\w{1,32}://)[^/\s]+@"  # the user and password of an address
    r"|\b(hf|sk|gh[a-z]|github_pat)_\w+|\b(sk|glpat)-[\w-]+"  # tokens that tell whose they are
    r"|(key|token|secret|passw\w*|pwd)=\S+",
    re.IGNORECASE,
)
MASK = "***"


def masked(name: str, value: str) -> str:
    """Return the value of a variable without what is secret in it.

    Example:
        >>> masked("MY_TOKEN", "abc"), masked("HF_ENDPOINT", "https://me:pass@hub.example/x")
        ('***', 'https://***@hub.example/x')
    """
    if SECRET_NAME.search(name):
        return MASK
    return SECRET_VALUE.sub(lambda match: f"{match['scheme']}{MASK}@" if match["scheme"] else MASK, value)


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed variables that are set, masked; nothing else of the environment may be kept in a value.

    Example:
        >>> shown_variables({"OPENMED_DEVICE": "cpu", "HOME": "/home/me"})
        {'OPENMED_DEVICE': 'cpu'}
    """
    return {name: masked(name, environ[name]) for name in SHOWN if name in environ}
