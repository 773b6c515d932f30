"""Write the synthetic notes of the notebooks, and the gold entities of some of them.

python scripts/write_course_notes.py

All patients, names and events are invented. Every sentence was written for this file. In the templates, ``[[...]]`` marks a
disease: the brackets become the gold entities, and symptoms are not marked. The same seed always gives the same files.
"""

from __future__ import annotations

import csv
import datetime as dt
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).parent.parent / "notebooks" / "data"
SEED = 39
NUM_PATIENTS = 40
NUM_NOTES = 120
NUM_GOLD = 30
MAX_REPEATS = 3
"""How often the same sentence may appear in all notes together."""

EMPTY = (17, 48, 73, 101)
"""Positions of the notes without a text."""

LONG = 60
"""Position of the note that is longer than the model's limit of tokens."""


class Condition(NamedTuple):
    """A chronic disease, its treatment, and its abbreviation."""

    name: str
    drug: str
    short: str = ""


CHRONIC = (
    Condition("type 2 diabetes mellitus", "metformin", "T2DM"),
    Condition("hypertension", "amlodipine", "HTN"),
    Condition("asthma", "inhaled budesonide"),
    Condition("chronic kidney disease", "ramipril", "CKD"),
    Condition("atrial fibrillation", "apixaban", "AF"),
    Condition("migraine", "sumatriptan"),
    Condition("rheumatoid arthritis", "methotrexate", "RA"),
    Condition("epilepsy", "lamotrigine"),
    Condition("psoriasis", "calcipotriol cream"),
    Condition("heart failure", "furosemide", "HF"),
    Condition("chronic obstructive pulmonary disease", "inhaled tiotropium", "COPD"),
    Condition("hypothyroidism", "levothyroxine"),
    Condition("gout", "allopurinol"),
    Condition("osteoporosis", "alendronate"),
    Condition("depression", "sertraline"),
    Condition("Parkinson disease", "levodopa", "PD"),
    Condition("multiple sclerosis", "glatiramer", "MS"),
    Condition("Crohn disease", "azathioprine"),
    Condition("ulcerative colitis", "mesalazine", "UC"),
    Condition("celiac disease", "a gluten-free diet"),
    Condition("glaucoma", "latanoprost drops"),
    Condition("iron deficiency anemia", "oral iron"),
    Condition("hyperlipidemia", "atorvastatin"),
    Condition("coronary artery disease", "aspirin", "CAD"),
)

# What happened, and what was done about it.
ACUTE = (
    ("Four days of cough and fever, crackles at the right base: [[pneumonia]].", "Amoxicillin for five days."),
    ("Burning on urination, nitrites positive: [[urinary tract infection]].", "Nitrofurantoin, plenty of fluids."),
    ("Sudden fever and aching limbs; the swab was positive for [[influenza]].", "Rest at home, no school this week."),
    ("The left ear hurts and the drum is red, as in [[otitis media]].", "Ibuprofen; no antibiotic for now."),
    ("Fell from a ladder and has a [[Lisfranc]].", "Cast for six weeks, X-ray on Monday."),
    ("Vomiting and diarrhea since the family party, most likely [[gastroenteritis]].", "Oral rehydration explained."),
    ("The lower leg is hot, red and swollen: [[cellulitis]].", "Flucloxacillin, leg elevated, border marked."),
    ("Pain moved to the right lower abdomen; ultrasound shows [[appendicitis]].", "Surgery tonight."),
    ("Calf swelling after a long flight, with a [[deep vein thrombosis]] on ultrasound.", "Rivaroxaban started."),
    ("Colicky flank pain; CT shows [[kidney stones]].", "Diclofenac, strain the urine."),
    ("A painful band of blisters on the chest, typical of [[shingles]].", "Valaciclovir for a week."),
    ("Blocked nose and facial pressure for ten days: [[sinusitis]].", "Nasal rinses and a steroid spray."),
    ("Hit by a swing, dizzy, normal neurology: [[concussion]].", "No sports for two weeks."),
    ("Both eyes are sticky in the morning, clearly [[conjunctivitis]].", "Wash hands, separate towels."),
    ("Epigastric pain with high lipase: [[acute pancreatitis]].", "Admitted for fluids and pain relief."),
    ("Fever with pain under the right ribs; the scan confirms [[cholecystitis]].", "Surgeon informed."),
    ("Swollen big toe after a feast, crystals seen: [[gouty arthritis]].", "Colchicine, low dose."),
    ("Woke with a drooping face that includes the forehead: [[Bell palsy]].", "Prednisolone and an eye pad."),
    ("Itchy wheals after strawberries, an [[urticaria]].", "Cetirizine, food diary."),
    ("Blood sugar of 2.9 after skipping lunch: [[hypoglycemia]].", "Juice, then bread; doses reviewed."),
    ("Weak after the heat wave, sodium 124: [[hyponatremia]].", "Fluids restricted, blood test tomorrow."),
    ("Stepped into a hole and has an [[ankle sprain]].", "Bandage, crutches, move it early."),
    (
        "Room spins when turning in bed, a typical [[benign paroxysmal positional vertigo]].",
        "Epley maneuver done twice.",
    ),
    ("Hoarse and febrile; the tonsils are covered with pus: [[tonsillitis]].", "Penicillin for seven days."),
)

OPENINGS = (
    "{Age}-year-old {person} in for a yearly review.",
    "Seen together with {possessive} daughter.",
    "Came without an appointment.",
    "Phone call at noon, {age} years old.",
    "Home visit; the stairs are hard for {object} now.",
    "Walked in smiling, weight {weight} kg.",
    "Second visit this month.",
    "Routine check before a trip abroad.",
    "Video visit with a poor connection.",
    "Brought in by a neighbor.",
    "Here to talk about blood results.",
    "{Age} years old, moved here from the coast.",
    "Arrived early and read in the waiting room.",
    "Asked for a sick note.",
    "Medication review with the pharmacist.",
    "Blood pressure {systolic}/{diastolic}, pulse {pulse}, weight {weight} kg.",
    "Works night shifts at a bakery.",
    "Retired gardener, lives alone with two cats.",
    "Ward round, day {day}.",
    "Transferred from the emergency department at {hour}:40.",
    "{Age}, teacher, still working.",
    "Wants to renew the driving license.",
    "Sent by the dentist.",
    "Interpreter present on the phone.",
    "Checkup after the holidays, plus {weight_gain} kg.",
    "Came by bicycle.",
    "Evening clinic, last patient of the day.",
    "Appointment moved twice because of work.",
)

HISTORY = (
    "Known [[{d}]], on {drug}.",
    "[[{D}]] since {year}, controlled with {drug}.",
    "Long-standing [[{d}]]; takes {drug} every day.",
    "Past medical history: [[{d}]].",
    "The [[{d}]] is stable on {drug}.",
    "Her specialist follows the [[{d}]] twice a year.",
    "He forgot {drug} for a week, and the [[{d}]] is worse.",
    "Diagnosed with [[{d}]] in {year}.",
    "Two problems stay on the list, [[{d}]] and [[{d2}]].",
    "Lives with [[{d}]] and [[{d2}]].",
    "[[{D}]]: no change, {drug} continued.",
    "Since {drug} was started, the [[{d}]] has been quiet.",
    "Treated elsewhere for [[{d}]] until {year}.",
    "Has both [[{d2}]] and [[{d}]]; the second one limits daily life.",
    "Main issue today is [[{d}]].",
    "Asks whether {drug} for [[{d}]] can be reduced.",
)

SHORT = (
    "PMH: [[{s}]], [[{d2}]].",
    "F/u [[{s}]], feels ok, cont {drug}.",
    "[[{s}]] stable.",
    "Hx of [[{s}]] since {year}, on {drug}.",
    "Known [[{s}]]; also [[{d2}]].",
    "Pt w/ [[{s}]], no new c/o.",
)

DENIED = (
    "Denies [[{n}]].",
    "No history of [[{n}]].",
    "No evidence of [[{n}]] on examination.",
    "[[{N}]] was ruled out last winter.",
    "The scan shows no [[{n}]].",
    "Never had [[{n}]].",
    "Negative for [[{n}]].",
    "There is no sign of [[{n}]] or [[{n2}]].",
    "Tests for [[{n}]] were normal.",
    "{Subject} does not have [[{n}]], as an old letter claims.",
    "Without [[{n}]] in the past.",
    "Not known for [[{n}]].",
    "The ECG and the blood test exclude [[{n}]].",
    "We found no [[{n}]].",
)

FAMILY = (
    "{Possessive} mother had [[{female}]].",
    "Family history of [[{f}]].",
    "A brother was treated for [[{f}]] at {age2}.",
    "{Possessive} father died of [[{male}]].",
    "Two aunts with [[{female}]].",
    "Worried because {possessive} sister has [[{female}]].",
    "Grandfather: [[{male}]].",
    "The daughter carries the gene for [[{gene}]].",
    "Both parents have [[{f}]].",
    "A cousin has [[{f}]].",
)

PLANS = (
    "Back in {weeks} weeks.",
    "Blood test before the next visit.",
    "Leaflet given, questions answered.",
    "Will call if things get worse.",
    "Vaccinated today, left arm.",
    "Letter to the employer written.",
    "Weigh daily and write it down.",
    "Physiotherapy, {weeks} sessions.",
    "Prescription renewed for {weeks} weeks.",
    "Drink more, salt less.",
    "Booked for an eye check.",
    "Agreed to walk {minutes} minutes a day.",
    "No new drugs.",
    "Discussed with the senior doctor at {hour}:15.",
    "Discharged home with {possessive} son.",
    "Foot check done, skin intact.",
    "Pill box filled for the week.",
    "Dose unchanged.",
    "Diary of meals until the next visit.",
    "Nurse to visit on Thursdays.",
    "Report sent to the insurance.",
    "Repeat the test in {weeks} weeks.",
    "Hearing test arranged.",
    "Given the number of the night service.",
    "Shoes with a firm sole recommended.",
    "Next visit by video.",
    "Stays on the list for the group course.",
    "Half a tablet less in the evening.",
    "Advised to rest for {day} days.",
    "Referred to the dietitian.",
)

SYMPTOMS = (
    "Sleeps badly, {hours} hours at most.",
    "Some chest pain when climbing stairs.",
    "Headache in the evenings.",
    "Feels tired, otherwise well.",
    "Appetite is back.",
    "No complaints.",
    "Back pain after gardening.",
    "Nausea in the morning, gone by noon.",
    "Short of breath at night, uses {pillows} pillows.",
    "Bowels regular, no blood.",
    "Skin is dry, no rash.",
    "Dizzy when standing up, {systolic}/{diastolic} standing.",
    "Walks the dog twice a day.",
    "Eats well and cooks for two.",
    "Mood is good, sings in a choir again.",
    "Stopped smoking in {year}.",
    "Drinks a glass of wine on Sundays.",
    "Weight steady for a year.",
    "Hands are stiff until ten in the morning.",
    "Forgets names, finds the way home.",
    "Swims on Tuesdays.",
    "Sees well with the new glasses.",
    "Lungs clear, heart sounds regular.",
    "Abdomen soft, liver not enlarged.",
    "Pulse {pulse}, regular.",
    "Reflexes equal on both sides.",
    "Ankles slim in the evening.",
    "Temperature 36.{day}.",
    "Hearing aid works again.",
    "Coughs at night, no fever.",
)

LETTERS = (
    "Dear Dr. {doctor}, thank you for seeing {title} {name}.",
    "{title} {name} was in our care for {day} days.",
    "Spoke to {title} {name} on the phone.",
    "To Dr. {doctor}: {title} {name}, {age}, needs your advice.",
)

NEGATED = (
    *("tuberculosis", "stroke", "angina", "pulmonary embolism", "hepatitis B", "lung cancer", "peptic ulcer disease"),
    *("diabetic retinopathy", "meningitis", "melanoma", "malaria", "HIV infection", "sarcoidosis", "endocarditis"),
    *("diverticulitis", "sleep apnea", "pericarditis", "Lyme disease", "liver cirrhosis", "aortic stenosis"),
)
INHERITED = {
    "f": (
        "colon cancer",
        "type 1 diabetes",
        "myocardial infarction",
        "Alzheimer disease",
        "schizophrenia",
        "bipolar disorder",
    ),
    "female": ("breast cancer", "ovarian cancer", "lupus erythematosus", "Huntington disease", "Alzheimer disease"),
    "male": ("prostate cancer", "colon cancer", "Huntington disease", "myocardial infarction", "emphysema"),
    "gene": ("cystic fibrosis", "hemophilia", "sickle cell disease", "Huntington disease"),
}
NAMES = {
    "woman": ("Ada Testwell", "Cleo Mockford", "Eve Notreal", "Ina Makebelieve"),
    "man": ("Bo Sampleton", "Dag Madeup", "Finn Placeholder", "Gus Invented"),
}
WRONG_PERSON = {"woman": "He ", "man": "Her "}
"""How a sentence starts that is not about this patient."""

DOCTORS = ("Fakename", "Dummy", "Fictive", "Noone", "Pretend")

# The long note: a hospital stay, day by day.
STAY = (
    "Discharge summary of a stay of three weeks.",
    "{title} {name}, {age}, was admitted with shortness of breath and swollen legs.",
    "Known [[heart failure]], [[atrial fibrillation]] and [[chronic kidney disease]].",
    "On day 1, furosemide was given through a vein, and two liters of fluid were lost by the evening.",
    "On day 2, the fever rose to 39.2, and a chest film showed [[pneumonia]] of the left lower lobe.",
    "Ceftriaxone was started within the hour, and blood cultures were taken from both arms.",
    "On day 3, the heart rate was 140, so bisoprolol was doubled and potassium was replaced.",
    "The echocardiogram showed an ejection fraction of 35%, slightly worse than in the spring.",
    "There was no [[endocarditis]], and the valves looked normal.",
    "On day 5, the kidneys recovered slowly after [[acute kidney injury]]; ramipril stayed on hold.",
    "A dietitian explained a meal plan with little salt, and the family took notes.",
    "On day 7, the patient was confused at night and pulled out a line.",
    "[[Delirium]] was treated with light during the day, a clock on the wall, and visits of the family.",
    "The head scan showed no [[subdural hematoma]].",
    "On day 9, a swollen arm was noticed near the line, and ultrasound found a [[venous thrombosis]].",
    "The line was removed, and apixaban, which had been paused, was given again.",
    "On day 11, stools were loose, and the test for clostridium toxin was negative.",
    "Skin care was changed because of a [[pressure ulcer]] at the left heel, two centimeters wide.",
    "Physiotherapists walked with the patient from the bed to the window, then along the corridor.",
    "On day 14, the cough was gone, and oxygen was no longer needed.",
    "An old note had the diagnosis of [[asthma]], but lung function was normal and the entry was deleted.",
    "The mother had [[dementia]], which worries the family, so a memory test was done: 27 of 30 points.",
    "On day 17, the weight was 71 kg, nine less than at admission.",
    "Iron was given once because of [[iron deficiency anemia]].",
    "The pharmacist removed three drugs from the list that were no longer needed.",
    "On day 19, the stairs were possible with one rest.",
    "The daughter was shown how to sort the tablets into a box for the week.",
    "A nurse will come on Mondays and Thursdays for the heel.",
    "The patient should call if the weight rises by two kilograms in three days.",
    "Vaccination against influenza is due in October.",
    "Blood tests of the kidneys are due in one week, and the heart clinic will see the patient in two.",
    "Diagnoses at discharge: [[heart failure]], [[pneumonia]], [[atrial fibrillation]] and [[venous thrombosis]].",
)


class Writer:
    """Fills templates so that no sentence appears more than ``MAX_REPEATS`` times."""

    def __init__(self) -> None:
        self.random = random.Random(SEED)
        self.used: Counter[str] = Counter()
        self.uses: Counter[str] = Counter()

    def sentence(self, templates: tuple[str, ...], values: dict[str, object]) -> str:
        """Return a sentence from one of the templates that were used least."""
        order = sorted(templates, key=lambda template: (self.uses[template], self.random.random()))
        for template in order:
            numbers = {
                "systolic": self.random.randint(104, 168),
                "diastolic": self.random.randint(58, 98),
                "pulse": self.random.randint(56, 104),
                "weight_gain": self.random.randint(2, 4),
                "weight": self.random.randint(49, 112),
                "day": self.random.randint(2, 9),
                "hour": self.random.randint(10, 19),
                "weeks": self.random.randint(2, 12),
                "minutes": self.random.choice((15, 20, 30, 40)),
                "hours": self.random.randint(3, 5),
                "pillows": self.random.randint(2, 4),
                "age2": self.random.randint(31, 69),
                "year": self.random.randint(2004, 2023),
                "n": self.random.choice(NEGATED[::2]),
                "n2": self.random.choice(NEGATED[1::2]),
                **{kind: self.random.choice(diseases) for kind, diseases in INHERITED.items()},
                "doctor": self.random.choice(DOCTORS),
            }
            every = {**numbers, **values}
            every["N"] = _capitalize(str(every["n"]))
            if template.startswith(WRONG_PERSON[str(values["person"])]):
                continue
            text = _capitalize(template.format(**every))
            if self.used[text] < MAX_REPEATS:
                self.used[text] += 1
                self.uses[template] += 1
                return text
        raise RuntimeError(f"Too few templates: {templates[0]}")


def _capitalize(text: str) -> str:
    start = 2 if text.startswith("[[") else 0
    return text[:start] + text[start : start + 1].upper() + text[start + 1 :]


def write_notes() -> list[tuple[str, str, str, str]]:
    """Return note id, patient, date and marked text of each note."""
    writer = Writer()
    draw = writer.random
    patients = []
    for number in range(NUM_PATIENTS):
        first = CHRONIC[number % len(CHRONIC)]
        second = draw.choice([condition for condition in CHRONIC if condition is not first])
        person = "woman" if number % 2 else "man"
        patients.append(
            {
                "d": first.name,
                "D": _capitalize(first.name),
                "s": first.short or first.name,
                "drug": first.drug,
                "d2": second.name,
                "age": draw.randint(41, 88),
                "person": person,
                "name": NAMES[person][number // 2 % len(NAMES[person])],
                "title": "Ms." if person == "woman" else "Mr.",
                "possessive": "her" if person == "woman" else "his",
                "Possessive": "Her" if person == "woman" else "His",
                "object": "her" if person == "woman" else "him",
                "Subject": "She" if person == "woman" else "He",
            }
        )
    notes = []
    date = dt.date(2025, 1, 7)
    for number in range(NUM_NOTES):
        patient = (number * 7) % NUM_PATIENTS
        values = {**patients[patient], "Age": patients[patient]["age"]}
        date += dt.timedelta(days=draw.randint(0, 4))
        text = "" if number in EMPTY else write_note(writer, number, values)
        notes.append((f"N{number + 1:03}", f"P{patient + 1:02}", date.isoformat(), text))
    return notes


def write_note(writer: Writer, number: int, values: dict[str, object]) -> str:
    """Return the marked text of one note."""
    draw = writer.random

    def sentence(templates: tuple[str, ...]) -> str:
        return writer.sentence(templates, values)

    if number == LONG:
        return " ".join(template.format(**values) for template in STAY)
    acute = ACUTE[number // 6 % len(ACUTE)]
    kind = number % 6
    if kind == 0:  # A review of a chronic disease.
        parts = [sentence(OPENINGS), sentence(HISTORY), sentence(SYMPTOMS), sentence(DENIED), sentence(PLANS)]
    elif kind == 1:  # Something acute.
        parts = [sentence(OPENINGS), sentence((acute[0],)), sentence((acute[1],))]
        if draw.random() < 0.5:
            parts.insert(1, sentence(HISTORY))
    elif kind == 2:
        parts = [sentence(SHORT), sentence(SYMPTOMS), sentence(PLANS)]
    elif kind == 3:
        parts = [sentence(OPENINGS), sentence(FAMILY), sentence(DENIED), sentence(HISTORY), sentence(PLANS)]
    elif kind == 4:
        parts = [sentence(LETTERS), sentence(HISTORY), sentence(DENIED), sentence(SYMPTOMS)]
    else:  # No disease at all, or only a denied one.
        parts = [sentence(OPENINGS), sentence(SYMPTOMS), sentence(PLANS)]
        if draw.random() < 0.5:
            parts.insert(1, sentence(DENIED))
    return " ".join(parts)


def unmark(marked: str) -> tuple[str, list[dict[str, object]]]:
    """Return the text without marks, and the marked entities."""
    text = ""
    entities: list[dict[str, object]] = []
    for plain, disease in re.findall(r"([^\[]*)(?:\[\[(.*?)\]\])?", marked):
        text += plain
        if disease:
            entities.append({"start": len(text), "end": len(text) + len(disease), "label": "DISEASE"})
            text += disease
    return text, entities


def main() -> None:
    """Write notes.csv and gold.jsonl."""
    notes = write_notes()
    DATA.mkdir(exist_ok=True)
    with (DATA / "notes.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("note_id", "patient", "date", "text"))
        writer.writerows((*row, unmark(marked)[0]) for *row, marked in notes)
    labeled = [note for note in notes if note[3]]
    chosen = labeled[:: len(labeled) // NUM_GOLD][:NUM_GOLD]
    with (DATA / "gold.jsonl").open("w", encoding="utf-8") as file:
        for note_id, _patient, _date, marked in chosen:
            text, entities = unmark(marked)
            file.write(json.dumps({"id": note_id, "text": text, "entities": entities}, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
