"""Nothing is silent: while any magic or long function works, with a slow model, the page changes all the time."""

import itertools

import pytest
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SILENCE = 0.5
"""Seconds after which a person wonders whether anything goes on."""

STALL = 2.0
"""Seconds that a busy computer, or a library that is loaded and lets no other thread run meanwhile, may add to that."""

WATCH = """() => {
    window.signs = [performance.now()]
    const sign = () => window.signs.push(performance.now())
    new MutationObserver(sign).observe(
        document.querySelector('.jp-Notebook'), {subtree: true, childList: true, characterData: true, attributes: true}
    )
}"""

SIGNS = """() => {
    const texts = [...document.querySelectorAll('.jp-Cell')].map(cell => cell.innerText)
    return {signs: window.signs, texts}
}"""

CELLS = (
    "%load_ext openmed_nb\nimport openmed_nb as nb",
    "%openmed",
    "%openmed_device --simulate mps",
    "%openmed_device --simulate off",
    "%openmed_ner --model {model} Patient has asthma.",
    "%openmed_doctor {model}",
    "%openmed_doctor --ops {model}",
    "%openmed_sweep {model} --seconds 3",
    "nb.compare({model!r}, devices='cpu', pairs=6, watch=0, seconds=3)",
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


def silences(signs):
    """Return the seconds between two signs of life, and when they began, the longest first."""
    return sorted(
        ((after - before) / 1000, round((before - signs[0]) / 1000, 1)) for before, after in itertools.pairwise(signs)
    )[::-1]


def test_the_page_never_stands_still(server, fronts, new_page, write, slow_model, picture):  # noqa: PLR0913, PLR0917
    """From the first cell to the last, something on the page changes before SILENCE and STALL are over, without exception."""
    cells = [cell.replace("{model!r}", repr(slow_model)).replace("{model}", slow_model) for cell in CELLS]
    front = fronts.FRONTS["lab"](server, new_page(height=4000), write("no_silence", *cells), "light")
    front.page.evaluate(WATCH)
    front.page.get_by_role("menuitem", name="Run", exact=True).click()
    front.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    for number in range(1, len(cells) + 1):  # Each may take as long as all of another notebook.
        expect(front.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").nth(number - 1)).to_have_text(
            f"[{number}]:"
        )
    told = front.page.evaluate(SIGNS)
    picture(front.page.locator(".jp-Notebook"), "no_silence")

    assert sum("finished after" in text for text in told["texts"]) >= 4
    longest = silences(told["signs"])
    assert longest[0][0] < SILENCE + STALL, longest[:10]
