"""The HTML of the panel: what each region says, that nothing from outside is read as HTML, and that all can be read."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb._events.activity import Activity
from openmed_nb._render.display import Report, Table
from openmed_nb.annotation.results import AnnotatedText
from openmed_nb.devices.choice import Candidate, DeviceChoice, DeviceList, Explanation
from openmed_nb.devices.environment import HIGH, LOW, plan
from openmed_nb.devices.request import Wish
from openmed_nb.errors import OpenMedError
from openmed_nb.models.store import Inventory, ModelInMemory
from openmed_nb.notebook.panel import rendering
from openmed_nb.notebook.panel.rendering import STYLE_SHEET, STYLES
from openmed_nb.notebook.panel.state import MemoryBar, MemoryPart, PanelState, look

GROUND, ACCENT = (
    re.search(rf"--openmed-{name}: var\([^,]+, (#\w+)\)", STYLE_SHEET)[1] for name in ("ground", "accent")
)
VERMILION = "#d55e00"
# What JupyterLab's dark theme has for the ground and the accent.
DARK = "#212121"
DARK_ACCENT = "#2196f3"

PAYLOADS = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(1)</script>',
    "' onmouseover='alert(1)",
    "</style><script>alert(1)</script>",
    "&lt;b&gt; & $x$ _",
)
REGIONS = (
    rendering.status,
    rendering.devices,
    rendering.environment,
    rendering.memory,
    rendering.models,
    rendering.activity,
    rendering.message,
    rendering.answer,
)
GIB = 1 << 30
ENTITY = {"entity_group": "DISEASE", "score": 0.9, "word": "asthma", "start": 7, "end": 13}


@pytest.fixture
def plain(computers):
    """What there is to see of a computer without a GPU."""
    return replace(PanelState(**look(computers.plain().session)), simulated=False)


def full(words="words", state="usable"):
    """Return a state in which every text from outside is the same words, and every region has something to show."""
    choice = DeviceChoice(words, words, words, words, certain=True)
    error = OpenMedError(words, words)
    candidates = (Candidate(words, None), Candidate("cpu", None))
    table = Table(words, (words, words), ((words, words),))
    return PanelState(
        DeviceList(candidates, choice),
        Explanation((Wish(words, words),), choice, plan({HIGH: words, LOW: "0.5"}), {words: words}),
        (MemoryBar(words, (MemoryPart(words, GIB), MemoryPart(words, GIB)), 4 * GIB, words, (GIB, 2 * GIB)),),
        Inventory((ModelInMemory(words, words, words, GIB, follows=True),)),
        activity=Activity(words, words, 0, 2),
        error=error if state == "failed" else None,
        said=Report(words, (words,), (table,)),
        answer=AnnotatedText(f"He has {words}", (ENTITY | {"entity_group": words},), words, words),
        seconds=0.012,
    )


def page(state):
    """Return all regions, one after the other."""
    return "".join(region(state) for region in REGIONS)


@pytest.mark.parametrize("state", ["usable", "failed"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_escaping_payloads(read, payload, state):
    """A payload in every place of every region reaches the page as text, and brings no element or attribute."""
    shown = full(payload, state)
    for region in REGIONS:
        assert payload in read(region(shown)).text, region


@given(words=st.text(min_size=1, max_size=30).filter(str.strip), state=st.sampled_from(["usable", "failed"]))
def test_escaping_any_words(read, words, state):
    """Whatever the words are, each region is closed, and has no element and no attribute that is not ours."""
    for region in REGIONS:
        assert read(region(full(words, state))).text


@pytest.mark.parametrize("state", ["usable", "failed"])
def test_tables_headers(read, state):
    """Each table has a caption or a summary that names it, and headers for columns and rows."""
    shown = read(page(full(state=state)))
    named = [element for details in shown.find("details") for element in details.content]
    tables = shown.find("table")
    assert len(tables) == (5 if state == "failed" else 6)
    for table in tables:
        columns = [one.text for one in table.find("th", scope="col")]
        rows = [row for body in table.find("tbody") for row in body.find("tr")]
        parts = [one.tag for one in table.content]
        assert parts in (["caption", "thead", "tbody"], ["thead", "tbody"])
        assert table in named if parts[0] == "thead" else table.content[0].text
        assert rows
        for row in rows:
            assert [one.tag for one in row.content] == ["th", *["td"] * (len(columns) - 1)]
            assert row.content[0].attributes["scope"] == "row"


def test_status_says_what_the_state_says(read, plain):
    """It is announced, and says which device is in force, why, and how sure that is; the device stands out."""
    shown = read(rendering.status(plain))
    (region,) = shown.content
    assert region.attributes == {"role": "status"}
    assert [f"Device: {shown.find('p')[0].text}", shown.find("p")[1].text] == list(plain.status)
    assert [one.text for one in shown.find("strong")] == ["cpu"]


@pytest.mark.parametrize(
    "spelling", ["cpu Device: mps, chosen", "Device: mps, asked for by you.", "<strong>mps</strong>"]
)
def test_status_words_like_ours(read, computers, spelling):
    """A variable whose value reads like a device in force is no such thing: what is in force alone is bold."""
    state = PanelState(**look(computers.plain(OPENMED_DEVICE=spelling).session))
    shown = read(rendering.status(state))
    assert shown.find("strong") == []
    assert "No device is in force." in shown.text
    chosen = replace(
        state,
        devices=replace(state.devices, choice=(choice := DeviceChoice("cpu", spelling, "you", "Yes.", certain=True))),
        explanation=replace(state.explanation, choice=choice),
    )
    assert [one.text for one in read(rendering.status(chosen)).find("strong")] == ["cpu"]


@pytest.mark.parametrize("simulated", [True, False])
def test_status_simulated(read, plain, simulated):
    """Under a simulation it says so."""
    shown = read(rendering.status(replace(plain, simulated=simulated))).text
    assert ("SIMULATED MPS: no figure here is one of MPS." in shown) is simulated


def test_devices_say_why_and_what_to_do(read, plain):
    """Each device has a row, folded up: its state, and where it cannot be used, why, and what to do if something can be done."""
    shown = read(rendering.devices(plain))
    rows = [[cell.text for cell in row.content] for row in shown.find("tr")[1:]]
    assert [one.text for one in shown.find("summary")] == ["Why not mps or cuda?"]
    assert "open" not in shown.find("details")[0].attributes
    assert [row[:2] for row in rows] == [["mps", "cannot be used"], ["cuda", "cannot be used"], ["cpu", "in force"]]
    assert rows[0][2:] == ["this computer runs Linux, and MPS is the GPU backend of macOS", ""]
    assert rows[1][2:] == ["no NVIDIA driver is loaded", "Install the driver if there is an NVIDIA GPU."]


@pytest.mark.parametrize(
    ("environ", "is_open", "summary"),
    [
        ({}, False, "MPS variables: 3 in time"),
        ({HIGH: "0.5", LOW: "0.9"}, True, "MPS variables: 1 in time, 2 conflict"),
        ({HIGH: "0,7"}, True, "MPS variables: 3 in time"),
    ],
    ids=["all well", "conflict", "no number"],
)
def test_environment_folded_up_where_all_is_well(read, plain, environ, is_open, summary):
    """The tables are folded up, unless a variable needs a remedy; one line says how it stands."""
    state = replace(plain, explanation=replace(plain.explanation, environment=plan(environ)))
    shown = read(rendering.environment(state))
    (details,) = shown.find("details")
    assert ("open" in details.attributes) is is_open
    assert details.content[0].tag == "summary"
    assert details.content[0].text == summary
    assert [one.text for one in shown.find("caption")] == ["Environment"]


def test_memory_bars_and_figures(read, plain):
    """A bar has a stripe for each part, with a pattern of its own; the same figures stand beside it as text."""
    parts = (MemoryPart("allocated", GIB), MemoryPart("cached", 2 * GIB))
    bar = MemoryBar("mps", parts, 8 * GIB, "what Metal recommends")
    shown = read(rendering.memory(replace(plain, memory=(bar,))))
    (row,) = shown.find("tbody")[0].content
    (stripes,) = shown.find("div", **{"class": "openmed-bar"})
    assert [one.attributes["style"] for one in stripes.content] == ["width:12.50%", "width:25.00%"]
    assert [one.attributes["class"] for one in stripes.content] == ["openmed-part-0", "openmed-part-1"]
    assert stripes.attributes["aria-hidden"] == "true"
    assert row.text == "mps" + "allocated 1.0 GiB cached 2.0 GiB" + "8.0 GiB, what Metal recommends"
    assert [one.text for one in shown.find("th", scope="col")] == ["memory", "used", "limit"]
    swatches = [one for one in row.find("span") if "openmed-swatch" in one.attributes["class"]]
    assert [one.attributes["class"].split()[1] for one in swatches] == ["openmed-part-0", "openmed-part-1"]


def test_memory_history(read, plain):
    """The last looks are a line from left to right over nothing, which is read aloud as the lowest and the highest of them."""
    bar = MemoryBar("mps", (MemoryPart("allocated", GIB),), 8 * GIB, "limit", (0, 2 * GIB, GIB))
    (line,) = read(rendering.memory(replace(plain, memory=(bar,)))).find("svg")
    assert line.attributes["role"] == "img"
    assert line.attributes["aria-label"] == "0 bytes to 2.0 GiB at the last 3 looks"
    assert line.find("polyline")[0].attributes["points"] == "0.0,20.0 60.0,1.0 120.0,10.5"


@pytest.mark.parametrize(
    ("looks", "points"), [((), []), ((GIB,), ["0.0,1.0 120.0,1.0"]), ((0,), ["0.0,20.0 120.0,20.0"])]
)
def test_memory_a_short_history(read, plain, looks, points):
    """A single look is a flat line, also where it found nothing; before the first there is none."""
    bar = MemoryBar("mps", (), 8 * GIB, "limit", looks)
    lines = read(rendering.memory(replace(plain, memory=(bar,)))).find("polyline")
    assert [one.attributes["points"] for one in lines] == points


def test_models_none(read, plain):
    """Without a model it says so in words, without an empty table."""
    shown = read(rendering.models(plain))
    assert shown.text == "No model is in memory; Annotate loads one."
    assert shown.find("table") == []


def test_models_each(read, plain):
    """Each model has a row with device, type and size."""
    model = ModelInMemory("bundled", "mps (SIMULATED)", "float32", 3 << 20, follows=True)
    shown = read(rendering.models(replace(plain, models=Inventory((model,)))))
    assert [cell.text for cell in shown.find("tr")[1].content] == [
        *("bundled", "mps (SIMULATED)", "float32", "3.0 MiB", "yes")
    ]
    assert shown.find("summary")[0].text == "1 model in memory: bundled"
    assert shown.find("th", scope="col")[-1].text == "follows the device"


def test_activity_in_words(read, plain):
    """It is announced in words; the sign that turns is not read aloud."""
    shown = read(rendering.activity(replace(plain, activity=Activity("Moving to mps", "bundled", 1, 3))))
    (region,) = shown.content
    sign, words = region.content
    assert region.attributes["role"] == "status"
    assert sign.attributes == {"class": "openmed-spinner", "aria-hidden": "true"}
    assert words.text == shown.text == "Moving to mps: bundled (2 of 3)"


def test_activity_a_cell(read, plain):
    """That a cell runs is said and not announced, unless something else is under way."""
    runs = replace(plain, cell_runs=True)
    shown = read(rendering.activity(runs))
    assert shown.text == "A cell runs: what you click may wait for its end."
    assert "role" not in shown.content[0].attributes
    assert read(rendering.activity(replace(runs, activity=Activity("Loading", "bundled")))).text == "Loading: bundled"


def test_message_error(read, plain):
    """An error is an alert that says that it is one, what happened and what to do, and hides what was said before."""
    state = replace(plain, error=OpenMedError("It broke.", "Mend it."), said=Report("Moved: bundled."))
    (region,) = read(rendering.message(state)).content
    assert region.attributes["role"] == "alert"
    assert [one.text for one in region.find("p")] == ["Error: It broke.", "What to do: Mend it."]


def test_message_said(read, plain):
    """What a click has to say is announced, tables and all."""
    report = Report("Released 9.7 MiB", ("Done.",), (Table("Causes", ("let go", "tensors"), (("models", "9.7 MiB"),)),))
    (region,) = read(rendering.message(replace(plain, said=report))).content
    assert region.attributes["role"] == "status"
    assert region.text == "Released 9.7 MiBDone.Causeslet gotensorsmodels9.7 MiB"


@pytest.mark.parametrize(
    ("device", "notes"),
    [
        ("cpu", []),
        (
            "mps (SIMULATED)",
            [
                "SIMULATED MPS: no figure here is one of MPS.",
                "This answer is of mps (SIMULATED), and the device is cpu now. Click Annotate for another.",
            ],
        ),
    ],
)
def test_answer_is_announced_with_marks_and_says_where_it_is_simulated_or_old(read, plain, device, notes):
    answer = AnnotatedText("He has asthma.", (ENTITY,), "m", device)
    (shown,) = read(rendering.answer(replace(plain, answer=answer, seconds=0.0123))).content

    assert shown.attributes == {"role": "status"}
    heading = f"1 entity found by m on {device} in 12\N{NO-BREAK SPACE}ms"
    assert [one.text for one in shown.find("p")] == [heading, *notes]
    assert [one.text for one in shown.find("mark")] == ["asthma DISEASE 0.900"]
    assert shown.find("table") == []


@pytest.mark.parametrize("region", [rendering.activity, rendering.message, rendering.answer])
def test_region_is_empty_where_there_is_nothing_to_say(plain, region):
    assert region(plain) == ""


@pytest.mark.parametrize(
    ("colour", "ground"), [(VERMILION, GROUND), (VERMILION, DARK), (ACCENT, GROUND), (DARK_ACCENT, DARK)]
)
def test_style_sheet_shapes_can_be_seen(contrast, colour, ground):
    """Bars, lines, the frame of an error and the ring of the focus stand out by 3 to 1, on a white and on a dark ground."""
    assert contrast(colour, ground) >= 3


def test_style_sheet_nothing_from_outside():
    """The sheet loads nothing, and holds no script."""
    assert not re.search(r"url\(|@import|https?:|<script|expression\(", STYLES)
    assert STYLES.count("<style>") == STYLES.count("</style>") == 1


def test_style_sheet_sign_rests_for_who_wants_less_motion():
    assert re.search(r"prefers-reduced-motion: reduce\) \{\S* ?\.openmed-spinner \{animation: none;\}", STYLE_SHEET)


def test_style_sheet_every_rule_holds_in_a_panel_only():
    """No rule of the sheet changes what is outside of a panel."""
    rules = re.sub(r"@(media|container)[^{]*\{|@keyframes[^{]*\{(?:[^{}]*\{[^}]*\})*[^{}]*\}", "", STYLE_SHEET)
    groups = re.findall(r"([^{}]+)\{[^{}]*\}", rules)
    selectors = [selector.strip() for group in groups for selector in re.split(r",(?![^(]*\))", group)]

    assert len(selectors) > 40
    assert [selector for selector in selectors if not selector.startswith(".openmed-panel")] == []


def test_style_sheet_every_class_has_a_rule():
    """Every class in the HTML has a rule in the sheet, but the one that MathJax heeds."""
    html = (
        page(full()) + page(full(state="failed")) + rendering.activity(replace(full(), activity=None, cell_runs=True))
    )
    used = {name for names in re.findall(r'class="([^"]*)"', html) for name in names.split()}
    assert {name for name in used if f".{name}" not in STYLES} == {"tex2jax_ignore"}
    assert {"openmed-first", "openmed-bar", "openmed-error", "openmed-said", "openmed-late"} <= used
