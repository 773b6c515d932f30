"""What a model can take of its tokenizer: which tokens, and how many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ModelUnusable

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LONGEST_REAL_LIMIT = 1_000_000
"""Tokenizers that know no limit say a number far above this one (transformers' ``VERY_LARGE_INTEGER``)."""

MODELS_WITH_OFFSET_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "esm")
"""Models that count positions from ``pad_token_id + 1``, so two of their positions are never used."""


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, name: str) -> None:
    """Check that the model has an embedding for every token of its tokenizer.

    Raises:
        ModelUnusable: Where it has not: an error in the middle of a text on a CPU, silently zero rows on MPS.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        what = f"The tokenizer of {name!r} has token {largest}, and the model has embeddings for {rows} tokens."
        raise ModelUnusable(what, "Call resize_token_embeddings on the model, and save both together.")


def usable_length(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> int:
    """Return how many tokens the model really takes, special tokens included.

    Some tokenizers know no limit, and a text beyond the model's position table gives an IndexError on a CPU and
    silently wrong rows on MPS.
    """
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and config.model_type in MODELS_WITH_OFFSET_POSITIONS:
        positions -= (config.pad_token_id or 0) + 1
    shortest = tokenizer.num_special_tokens_to_add() + 1
    limits = [limit for limit in (tokenizer.model_max_length, positions) if isinstance(limit, (int, float))]
    return int(min((limit for limit in limits if shortest <= limit < LONGEST_REAL_LIMIT), default=512))
