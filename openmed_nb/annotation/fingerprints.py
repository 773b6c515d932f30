"""Short numbers and texts that tell one text, one model, one run from another, without holding any of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..devices.backend import TENSOR_LOCK
from ..models.loading import packed_layers
from .references import Reference

if TYPE_CHECKING:
    from .pipeline import AnnotationPipeline
    from .stream import Annotator

# How many numbers of each weight are looked at, evenly over the whole.
SAMPLE = 64


def fingerprint_of(text: Any) -> int:
    """Return a number that tells one text from another; of what is no text, only its kind counts."""
    digest = hashlib.blake2b(readable(text).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def readable(text: Any) -> str:
    """Return a text, the words of one that is split, the identity of one that is elsewhere, or the kind of anything else."""
    if isinstance(text, str):
        return text
    if isinstance(text, Reference):
        return f"\0{text.identity}"
    words = map(readable, text) if isinstance(text, list) else ()
    return "\0".join((f"\0{type(text).__name__}", *words))


def settings_of(pipe: AnnotationPipeline, annotator: Annotator) -> dict[str, Any]:
    """Return what tells a run from another, the model and everything that changes its answers, as JSON has it."""
    settings = {"model": fingerprint_of_model(pipe), **asdict(annotator.settings)}
    return dict(json.loads(json.dumps(settings)))


def differences(settings: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """Return the names of the settings that an earlier run had otherwise; empty if its answers are as good as this one's."""
    return ", ".join(sorted(name for name in settings if earlier.get(name) != settings[name]))


def fingerprint_of_model(pipe: AnnotationPipeline) -> str:
    """Return a short text that tells a model from others: its labels, its tokenizer, and a sample of each weight."""
    digest = hashlib.blake2b(repr(sorted(pipe.model.config.id2label.items())).encode(), digest_size=8)
    backend = pipe.tokenizer.backend_tokenizer
    with TENSOR_LOCK:
        backend.no_truncation()
        backend.no_padding()
        digest.update(backend.to_str().encode())
        for name, weight in pipe.model.named_parameters():
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            sample = weight.detach().flatten()[:: max(1, weight.numel() // SAMPLE)]
            digest.update(sample.float().cpu().numpy().tobytes())
        for name, layer in packed_layers(pipe.model):
            weight = layer.weight().flatten()
            sample = weight[:: max(1, weight.numel() // SAMPLE)].dequantize()
            digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()
