"""What a model can take of its tokenizer: which tokens, and how many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ModelUnusable, cause

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST_REAL_LIMIT = 1_000_000
"""Tokenizers that know no limit say a number far above this one (transformers' ``VERY_LARGE_INTEGER``)."""

NAMES_OF_LIMITS = ("max_position_embeddings", "max_seq_len")
"""What configurations call the longest input; MPT has no table, and cannot read more either."""

RARE_CHARACTERS = "\ua66e \U00012000 \u16a0 \U0001f9ff"
"""Letters of scripts that hardly a vocabulary has: Cyrillic, cuneiform and runic ones, and an emoji."""


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


def check_unknown_words(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Check that a tokenizer can read what is not in its vocabulary.

    Raises:
        ModelUnusable: Where it has no token for that, and would fail in the middle of a text.
    """
    try:
        tokenizer(RARE_CHARACTERS)
    except Exception as error:  # The tokenizers library raises bare Exceptions.
        what = f"The tokenizer of {name!r} cannot read what is not in its vocabulary: {cause(error)}."
        raise ModelUnusable(what, "Add its unknown token to the vocabulary, or use another model.") from error


def positions_of(model: PreTrainedModel) -> int | None:
    """Return how many tokens a model has positions for, ``None`` where nothing limits them.

    A table of positions says how many it has; where it has a row for padding, as RoBERTa's, the first token's is the
    next one. A model may take fewer than its table has, which its configuration then says.
    """
    stated = [getattr(model.config, name, None) for name in NAMES_OF_LIMITS]
    tables = [
        module.weight.shape[0] - (-1 if module.padding_idx is None else module.padding_idx) - 1
        for name, module in model.named_modules()
        if "position" in name.rpartition(".")[2] and hasattr(module, "padding_idx")
    ]
    return min((limit for limit in [*stated, *tables] if isinstance(limit, int) and limit > 0), default=None)


def usable_length(tokenizer: PreTrainedTokenizerBase, positions: int | None) -> int:
    """Return how many tokens the model really takes, special tokens included.

    Some tokenizers know no limit, and a text beyond the model's position table gives an IndexError on a CPU and
    silently wrong rows on MPS.

    Args:
        tokenizer: Its tokenizer.
        positions: How many tokens it has positions for.
    """
    shortest = tokenizer.num_special_tokens_to_add() + 1
    limits = [limit for limit in (tokenizer.model_max_length, positions) if isinstance(limit, (int, float))]
    return int(min((limit for limit in limits if shortest <= limit < LONGEST_REAL_LIMIT), default=512))
