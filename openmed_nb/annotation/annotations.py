"""What a model found in many texts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError
from ..interface.display import Json, Piece, Report, Shown
from .annotated import HIDDEN, marked
from .answers import Answers
from .decoding import Entity
from .summary import Summary

if TYPE_CHECKING:
    import pandas as pd

SHOWN_TEXTS = 5
"""How many texts are shown with their entities marked; only these are kept."""

SHOWN_CHARACTERS = 2000
"""How much of each is shown."""


@dataclass(frozen=True, repr=False, eq=False)
class Annotations(Shown, Sequence[list[Entity]]):
    """The entities of many texts: a sequence with a list for each text, in the order of the texts.

    Attributes:
        answers: The entities of all texts.
        first_texts: The first texts, to be shown.
        model: The name of the model.
        device: The device that it ran on.
        show_text: Whether texts, and the words in them, are part of what is shown.
        settings: What tells its run from another: the model and everything that changes its answers.
    """

    answers: Answers
    first_texts: tuple[str, ...]
    model: str
    device: str
    show_text: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.answers)

    def __getitem__(self, number: Any) -> Any:
        return self.answers[number]

    def __iter__(self) -> Iterator[list[Entity]]:
        return iter(self.answers)

    @property
    def errors(self) -> Mapping[int, str]:
        """Why texts have no answer, by their number."""
        return dict(self.answers.errors)

    def to_dict(self) -> dict[str, Any]:
        """Return model, device, and for each text its entities or its error, as plain mappings and lists."""
        errors = self.answers.errors
        texts = [
            {"error": errors[number]} if number in errors else {"entities": entities}
            for number, entities in enumerate(self)
        ]
        return {"model": self.model, "device": self.device, "texts": texts}

    def to_json(self) -> Json:
        """Return :meth:`to_dict` as JSON."""
        return Json(json.dumps(self.to_dict(), ensure_ascii=False))

    def to_frame(self) -> pd.DataFrame:
        """Return a table with a row for each entity: ``text`` (its number), label, ``score``, ``word``, ``start``, ``end``.

        Raises:
            ConfigurationError: Where pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigurationError("to_frame() needs pandas.", "Install it: python -m pip install pandas.") from error
        return pd.DataFrame(self.answers.columns())

    def summary(self) -> Summary:
        """Return counts: of texts, of entities by label, and of the words that were found most often."""
        words = Counter(word.lower() for word in self.answers.words)
        return Summary(
            model=self.model,
            device=self.device,
            texts=len(self),
            empty=sum(1 for count in self.answers.counts() if not count) - len(self.answers.errors),
            errors=tuple(sorted(self.answers.errors.items())),
            labels=tuple(sorted(Counter(self.answers.labels).items())),
            words=tuple(sorted(words.items(), key=lambda word: (-word[1], word[0]))) if self.show_text else (),
        )

    def report(self) -> Report:
        """Return what there is to show: counts, and the first texts with their entities marked."""
        summary = self.summary()
        if not self.show_text:
            return Report(summary.title, (*summary.sentences, HIDDEN), tables=summary.tables[:1])
        shown = f"Shown: the first {len(self.first_texts)} texts." if 0 < len(self.first_texts) < len(self) else ""
        sentences = (*summary.sentences, *([shown] if shown else []))
        return Report(summary.title, sentences, tables=summary.tables[:1], pieces=tuple(self._pieces()))

    def _pieces(self) -> Iterator[Piece]:
        for number, (text, entities) in enumerate(zip(self.first_texts, self, strict=False)):
            yield Piece(f"{number}: ")
            if number in self.answers.errors:  # It may be one that nothing can show, such as half of a surrogate pair.
                yield Piece("(no answer)\n")
                continue
            shown = text[:SHOWN_CHARACTERS]
            yield from marked(shown, [entity for entity in entities if entity["end"] <= len(shown)])
            yield Piece("…\n" if len(shown) < len(text) else "\n")
