"""Nothing is silent: while any magic or long function works, with a slow model, the page changes all the time."""

import itertools

import pytest

pytestmark = pytest.mark.slow

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
    "%load_ext openmed_nb\nimport openmed_nb as nb\nmodel = {model!r}\nnotes = ['She has asthma and no fever. ' * 40] * 60",
    "%openmed",
    "%openmed_device --simulate mps",
    "%openmed_device --simulate off",
    "%openmed_ner --model {{model}} Patient has asthma.",
    "%%openmed_ner --model {{model}} --from notes",
    "%openmed_doctor {{model}}",
    "%openmed_doctor --ops {{model}}",
    "%openmed_sweep {{model}} --seconds 5",
    "%openmed_log",
    "%openmed_release",
    "nb.compare(model, devices='cpu', pairs=6, watch=1, seconds=10)",
    "nb.runbook.parity(model, notes[:8])",
    "nb.runbook.profile(model, steps=3)",
    "nb.handoff('handed_over', rounds=3)",
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
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "intermediate_size": 2048,
            "num_attention_heads": 8,
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
    """From the first cell to the last, something on the page changes at least every half a second."""
    cells = [cell.replace("{{model}}", slow_model).replace("{model!r}", repr(slow_model)) for cell in CELLS]
    front = fronts.FRONTS["lab"](server, new_page(height=4000), write("no_silence", *cells), "light")
    front.page.evaluate(WATCH)
    front.run_all()
    told = front.page.evaluate(SIGNS)
    picture(front.page.locator(".jp-Notebook"), "no_silence")

    assert sum("finished after" in text for text in told["texts"]) >= 8
    assert silences(told["signs"])[0][0] < SILENCE + STALL, silences(told["signs"])[:10]
