"""Tests that all magics and long functions show their progress, with a slow model."""

import itertools

import pytest
from playwright.sync_api import expect

from helpers import front_ends

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SILENCE = 0.5
"""Maximum time without visible progress, in seconds."""

LOOK = 50
"""Milliseconds from one look at the page to the next; a page that is late to look says nothing about the kernel."""

PATIENCE = 900_000
"""Milliseconds for one cell, of which the report takes minutes."""

LINES_IN_PROGRESS = """() => [...document.querySelectorAll('.jp-Notebook .jp-OutputArea-output')].filter(output =>
    output.checkVisibility() && /^[A-Z][^\\n]*: [^\\n]*, ([\\d.]+ m?s|[\\d:]+)(, about [^\\n]+ left)?$/.test(output.innerText.trim())
).length"""
"""Number of displayed lines of operations in progress, each with its duration."""

WATCH = f"""() => {{
    window.looks = []
    let changed = true
    new MutationObserver(() => {{ changed = true }}).observe(
        document.querySelector('.jp-Notebook'), {{subtree: true, childList: true, characterData: true, attributes: true}}
    )
    setInterval(() => {{
        window.looks.push(changed || ({LINES_IN_PROGRESS})() > 0)
        changed = false
    }}, {LOOK})
}}"""
"""Sample the page repeatedly, and record changes and lines of operations in progress; other constant text does not count."""

TEXT = "Patient has type 2 diabetes mellitus and hypertension. "

CELLS = (
    "%load_ext openmed_nb\nimport openmed_nb as nb",
    "%openmed",
    "%openmed_device --simulate mps",
    "%openmed_device --simulate off",
    "%openmed_ner --model {model} Patient has asthma.",
    "%openmed_doctor {model}",
    "%openmed_doctor --ops {model}",
    "%openmed_sweep {model} --seconds 3",
    "nb.compare({model!r}, devices='cpu', seconds=3)",
    f"NOTES = [{TEXT!r} * 20] * 60",
    f"%%openmed_ner --model {{model}}\n{TEXT * 100}",
    "found = nb.annotate(NOTES, {model!r})",
    "same = nb.runbook.parity({model!r}, NOTES[:20], device='cpu', dtype='bfloat16')",
    "nb.runbook.validate_precision({model!r}, NOTES[:20], device='cpu')",
    "where = nb.runbook.profile({model!r}, device='cpu', steps=3)",
    "nb.runbook.forecast({model!r})",
    "nb.handoff('bundle', {model!r}, device='cpu')",
    "nb.verdict(where, same)",
    "nb.system_status()",
    "%openmed_report reported --quick",
    "%openmed_log",
    "%openmed_release",
    "%openmed_panel",
)


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory):
    """The folder of a model with random weights that takes a second for a few notes."""
    import openmed_nb as nb

    folder = str(tmp_path_factory.mktemp("slow") / "model")
    pipe = nb.load_pipeline("bundled_small", device="cpu")
    pipe.tokenizer.save_pretrained(folder)
    config = type(pipe.model.config)(
        **{
            **pipe.model.config.to_dict(),
            "hidden_size": 384,
            "num_hidden_layers": 4,
            "intermediate_size": 1536,
            "num_attention_heads": 6,
        }
    )
    type(pipe.model)(config).save_pretrained(folder)
    return folder


def silences(looks):
    """Return the lengths and starts of the periods without visible progress, the longest first."""
    runs = [(alive, len(list(run))) for alive, run in itertools.groupby(looks)]
    begins = itertools.accumulate((length for _alive, length in runs), initial=0)
    silent = ((length, begin) for (alive, length), begin in zip(runs, begins, strict=False) if not alive)
    return [(length * LOOK / 1000, begin * LOOK / 1000) for length, begin in sorted(silent, reverse=True)]


def test_page_shows_progress_at_all_times(server, new_page, write, slow_model, picture):
    """From the first cell to the last, half a second never passes without a line in progress or a change on the page."""
    cells = [cell.replace("{model!r}", repr(slow_model)).replace("{model}", slow_model) for cell in CELLS]
    front = front_ends.FRONTS["lab"](server, new_page(height=4000), write("no_silence", *cells), "light")
    front.page.evaluate(WATCH)
    front.page.get_by_role("menuitem", name="Run", exact=True).click()
    front.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    for number in range(1, len(cells) + 1):  # Each may take as long as all of another notebook.
        expect(front.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").nth(number - 1)).to_have_text(
            f"[{number}]:", timeout=PATIENCE
        )
    looks = front.page.evaluate("window.looks")
    texts = front.page.locator(".jp-Notebook .jp-Cell").all_inner_texts()
    picture(front.page.locator(".jp-Notebook"), "no_silence")

    assert sum("Done in" in text for text in texts) >= 12
    assert front.page.evaluate(LINES_IN_PROGRESS) == 0
    longest = silences(looks)
    assert longest[0][0] < SILENCE, longest[:10]


LINES = """
from openmed_nb._events.activity import ProgressEvent
from openmed_nb._events.progress import ProgressLine
for end in ("", "finished"):
    display(ProgressLine(ProgressEvent("Comparing", "bundled", 7, 20, "turn"), 12.6, end, eta_seconds=18))
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_line_shows_an_operation_until_it_ends(server, new_page, write, picture, theme):
    """The line of an operation in progress shows what it does and how long, and that of a finished one only how long."""
    front = front_ends.FRONTS["lab"](server, new_page(height=600), write(f"lines_{theme}", LINES), theme)
    front.run_all()
    outputs = front.page.locator(".jp-OutputArea-output")
    expect(outputs).to_have_text(
        [
            "Comparing: bundled  7 of 20 turns, 12 s, about 18 s left",
            "Done in 12 s",
        ]
    )
    expect(outputs.get_by_role("progressbar", name="Comparing: bundled")).to_be_visible()
    assert front.page.evaluate(LINES_IN_PROGRESS) == 1
    picture(front.page.locator(".jp-Notebook"), f"line_{theme}")
