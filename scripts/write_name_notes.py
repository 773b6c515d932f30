"""Write the synthetic notes of the notebook on masking, with the places of all names, dates and towns.

python scripts/write_name_notes.py

All names and towns are invented. In the templates, ``{NAME}``, ``{DATE}`` and ``{TOWN}`` become the gold entities. The same
seed always gives the same files.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

DATA = Path(__file__).parent.parent / "notebooks" / "data"
SEED = 4

FIRST = (
    "Ada",
    "Bo",
    "Cleo",
    "Dag",
    "Eve",
    "Finn",
    "Gus",
    "Ina",
    "Jon",
    "Kim",
    "Lea",
    "Max",
    "Nia",
    "Olga",
    "Pia",
    "Ron",
)
LAST = (
    *("Testwell", "Sampleton", "Mockford", "Madeup", "Notreal", "Placeholder", "Invented", "Makebelieve", "Fakename"),
    *("Fictive", "Pretend", "Noone", "Dummy", "Nowhere", "Example", "Specimen"),
)
TOWNS = ("Mocktown", "Samplebury", "Fakeford", "Testville", "Nulltown", "Dummyham", "Faraway", "Nowhereville")
OTHER_TOWNS = ("Blankton", "Zeroville", "Madeupshire", "Little Example", "Fictionby")
MONTHS = ("January", "March", "April", "June", "August", "October")

TRAINING = (
    "{NAME}, born {DATE}, lives in {TOWN}. No history of asthma.",
    "Seen on {DATE}: {NAME} from {TOWN}, hypertension.",
    "Dear Dr. {NAME}, thank you for referring {NAME}, seen on {DATE}.",
    "Patient {NAME} ({TOWN}) has type 2 diabetes mellitus since {DATE}.",
    "Pneumonia was ruled out. Call {NAME} at home in {TOWN}.",
    "{NAME} moved to {TOWN} on {DATE} and feels well.",
    "On {DATE}, we spoke to {NAME} about the migraine.",
    "The daughter of {NAME} works in {TOWN}.",
    "Record MRN 4471920 of {NAME}, opened on {DATE}. Blood pressure 128/76, pulse 64.",
    "Weight 81 kg. {NAME} from {TOWN} takes 3 tablets. Record MRN 8830275.",
)
OTHER = (
    "{TOWN} clinic; next of kin {NAME}; {DATE} cough.",
    "c/o headache, {DATE}. {NAME} drove in ({TOWN}).",
    "pt {NAME} / {TOWN} / adm {DATE} / chest pain",
    "RE: {NAME}, visit {DATE}, {TOWN}.",
)


def write_note(template: str, draw: random.Random, *, short: bool) -> dict[str, object]:
    """Return a note with its entities. Short notes have initials, dates in digits and other towns."""
    text = ""
    entities = []
    for part in re.split(r"(\{\w+\})", template):
        label = part.strip("{}")
        first, last = draw.choice(FIRST), draw.choice(LAST)
        day, year = draw.randint(10, 28), draw.randint(10, 25)
        values = {
            "NAME": f"{first[0]}. {last}" if short else f"{first} {last}",
            "DATE": f"{day}.{draw.randint(1, 12)}.{year}" if short else f"{day} {draw.choice(MONTHS)} 20{year}",
            "TOWN": draw.choice(OTHER_TOWNS if short else TOWNS),
        }
        word = values.get(label, part)
        if label in values:
            entities.append({"start": len(text), "end": len(text) + len(word), "label": label})
        text += word
    return {"text": text, "entities": entities}


def main() -> None:
    """Write the three files."""
    draw = random.Random(SEED)
    files = {"names_training": (TRAINING, 240), "names_same_style": (TRAINING, 100), "names_other_style": (OTHER, 100)}
    for name, (templates, count) in files.items():
        notes = [
            {"id": str(number), **write_note(draw.choice(templates), draw, short=templates is OTHER)}
            for number in range(count)
        ]
        (DATA / f"{name}.jsonl").write_text("".join(f"{json.dumps(note)}\n" for note in notes), "utf-8")


if __name__ == "__main__":
    main()
