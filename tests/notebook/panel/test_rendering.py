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

TEXT, GROUND, ACCENT = (
    re.search(rf"--openmed-{name}: var\([^,]+, (#\w+)\)", STYLE_SHEET)[1] for name in ("text", "ground", "accent")
)
VERMILION = "#d55e00"

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


class TestEscaping:
    """Text from outside is shown as text."""

    @pytest.mark.parametrize("state", ["usable", "failed"])
    @pytest.mark.parametrize("payload", PAYLOADS)
    def test_payloads(self, read, payload, state):
        """A payload in every place of every region reaches the page as text, and brings no element or attribute."""
        shown = full(payload, state)
        for region in REGIONS:
            assert payload in read(region(shown)).text, region

    @given(words=st.text(min_size=1, max_size=30).filter(str.strip), state=st.sampled_from(["usable", "failed"]))
    def test_any_words(self, read, words, state):
        """Whatever the words are, each region is closed, and has no element and no attribute that is not ours."""
        for region in REGIONS:
            assert read(region(full(words, state))).text

    def test_headings(self, read, plain):
        """A heading is one element, whatever its name."""
        (heading,) = read(rendering.top(PAYLOADS[1], plain)).content
        assert (heading.tag, heading.text) == ("h2", PAYLOADS[1])


class TestTables:
    """Tables are real ones."""

    @pytest.mark.parametrize("state", ["usable", "failed"])
    def test_headers(self, read, state):
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

    def test_long_names_may_break(self):
        """The name of a variable may break anywhere, where the panel is too narrow for it."""
        assert ".openmed-panel .openmed-nb details tbody th {overflow-wrap: anywhere;}" in STYLE_SHEET


class TestStatus:
    """The device."""

    def test_says_what_the_state_says(self, read, plain):
        """It is announced, and says which device is in force, why, and how sure that is; the device stands out."""
        shown = read(rendering.status(plain))
        (region,) = shown.content
        assert region.attributes == {"role": "status"}
        assert [f"Device: {shown.find('p')[0].text}", shown.find("p")[1].text] == list(plain.status)
        assert [one.text for one in shown.find("strong")] == ["cpu"]

    def test_no_device(self, read, computers):
        """Where no device is in force, it says so, with what to do."""
        state = replace(PanelState(**look(computers.plain(OPENMED_DEVICE="mps").session)), simulated=False)
        shown = read(rendering.status(state))
        assert [one.text for one in shown.find("p")] == list(state.status)
        assert "No device is in force." in shown.text
        assert "Use 'auto', which takes the best device of this computer." in shown.text

    @pytest.mark.parametrize(
        "spelling", ["cpu Device: mps, chosen", "Device: mps, asked for by you.", "<strong>mps</strong>"]
    )
    def test_words_like_ours(self, read, computers, spelling):
        """A variable whose value reads like a device in force is no such thing: what is in force alone is bold."""
        state = PanelState(**look(computers.plain(OPENMED_DEVICE=spelling).session))
        shown = read(rendering.status(state))
        assert shown.find("strong") == []
        assert "No device is in force." in shown.text
        chosen = replace(
            state,
            devices=replace(
                state.devices, choice=(choice := DeviceChoice("cpu", spelling, "you", "Yes.", certain=True))
            ),
            explanation=replace(state.explanation, choice=choice),
        )
        assert [one.text for one in read(rendering.status(chosen)).find("strong")] == ["cpu"]

    @pytest.mark.parametrize("simulated", [True, False])
    def test_simulated(self, read, plain, simulated):
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


class TestEnvironment:
    """The variables."""

    @pytest.mark.parametrize(
        ("environ", "is_open", "summary"),
        [
            ({}, False, "MPS variables: 3 in time"),
            ({HIGH: "0.5", LOW: "0.9"}, True, "MPS variables: 1 in time, 2 conflict"),
            ({HIGH: "0,7"}, True, "MPS variables: 3 in time"),
        ],
        ids=["all well", "conflict", "no number"],
    )
    def test_folded_up_where_all_is_well(self, read, plain, environ, is_open, summary):
        """The tables are folded up, unless a variable needs a remedy; one line says how it stands."""
        state = replace(plain, explanation=replace(plain.explanation, environment=plan(environ)))
        shown = read(rendering.environment(state))
        (details,) = shown.find("details")
        assert ("open" in details.attributes) is is_open
        assert details.content[0].tag == "summary"
        assert details.content[0].text == summary
        assert [one.text for one in shown.find("caption")] == ["Environment"]

    def test_other_variables(self, read, computers):
        """Other variables that matter have a table of their own."""
        state = PanelState(**look(computers.plain(OPENMED_DEVICE="cpu").session))
        other = read(rendering.environment(state)).find("table")[1]
        assert other.content[0].text == "Other variables"
        assert other.find("td")[0].text == "cpu"


class TestMemory:
    """The bars."""

    def test_bars_and_figures(self, read, plain):
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

    def test_history(self, read, plain):
        """The last looks are a line from left to right over nothing, which is read aloud as the lowest and the highest of them."""
        bar = MemoryBar("mps", (MemoryPart("allocated", GIB),), 8 * GIB, "limit", (0, 2 * GIB, GIB))
        (line,) = read(rendering.memory(replace(plain, memory=(bar,)))).find("svg")
        assert line.attributes["role"] == "img"
        assert line.attributes["aria-label"] == "0 bytes to 2.0 GiB at the last 3 looks"
        assert line.find("polyline")[0].attributes["points"] == "0.0,20.0 60.0,1.0 120.0,10.5"

    @pytest.mark.parametrize(
        ("looks", "points"), [((), []), ((GIB,), ["0.0,1.0 120.0,1.0"]), ((0,), ["0.0,20.0 120.0,20.0"])]
    )
    def test_a_short_history(self, read, plain, looks, points):
        """A single look is a flat line, also where it found nothing; before the first there is none."""
        bar = MemoryBar("mps", (), 8 * GIB, "limit", looks)
        lines = read(rendering.memory(replace(plain, memory=(bar,)))).find("polyline")
        assert [one.attributes["points"] for one in lines] == points


class TestModels:
    """What is loaded."""

    def test_none(self, read, plain):
        """Without a model it says so in words, without an empty table."""
        shown = read(rendering.models(plain))
        assert shown.text == "No model is in memory; Annotate loads one."
        assert shown.find("table") == []

    def test_each(self, read, plain):
        """Each model has a row with device, type and size."""
        model = ModelInMemory("bundled", "mps (SIMULATED)", "float32", 3 << 20, follows=True)
        shown = read(rendering.models(replace(plain, models=Inventory((model,)))))
        assert [cell.text for cell in shown.find("tr")[1].content] == [
            *("bundled", "mps (SIMULATED)", "float32", "3.0 MiB", "yes")
        ]
        assert shown.find("summary")[0].text == "1 model in memory: bundled"
        assert shown.find("th", scope="col")[-1].text == "follows the device"


class TestActivity:
    """What is under way."""

    def test_in_words(self, read, plain):
        """It is announced in words; the sign that turns is not read aloud."""
        shown = read(rendering.activity(replace(plain, activity=Activity("Moving to mps", "bundled", 1, 3))))
        (region,) = shown.content
        sign, words = region.content
        assert region.attributes["role"] == "status"
        assert sign.attributes == {"class": "openmed-spinner", "aria-hidden": "true"}
        assert words.text == shown.text == "Moving to mps: bundled (2 of 3)"

    def test_nothing(self, plain):
        """Where nothing is under way, nothing stands there."""
        assert rendering.activity(plain) == ""

    def test_a_click_that_waits(self, read, plain):
        """That a click waits for a cell is announced, whatever the cell does; between cells it is soon answered."""
        waits = replace(plain, waiting=2)
        assert rendering.activity(waits) == ""
        for doing in (None, Activity("Loading", "bundled")):
            (region,) = read(rendering.activity(replace(waits, cell_runs=True, activity=doing))).content
            assert region.attributes["role"] == "status"
            assert region.text == "Your click waits for the end of the running cell."
        assert read(rendering.activity(replace(waits, activity=doing))).text == "Loading: bundled"

    def test_a_cell(self, read, plain):
        """That a cell runs is said and not announced, unless something else is under way."""
        runs = replace(plain, cell_runs=True)
        shown = read(rendering.activity(runs))
        assert shown.text == "A cell runs: what you click may wait for its end."
        assert "role" not in shown.content[0].attributes
        assert (
            read(rendering.activity(replace(runs, activity=Activity("Loading", "bundled")))).text == "Loading: bundled"
        )

    def test_the_sign_rests(self):
        """Who wants less motion sees the sign at rest."""
        assert re.search(r"prefers-reduced-motion: reduce\) \{\S* ?\.openmed-spinner \{animation: none;\}", STYLE_SHEET)


class TestMessage:
    """What came of the last click."""

    def test_error(self, read, plain):
        """An error is an alert that says that it is one, what happened and what to do, and hides what was said before."""
        state = replace(plain, error=OpenMedError("It broke.", "Mend it."), said=Report("Moved: bundled."))
        (region,) = read(rendering.message(state)).content
        assert region.attributes["role"] == "alert"
        assert [one.text for one in region.find("p")] == ["Error: It broke.", "What to do: Mend it."]

    def test_said(self, read, plain):
        """What a click has to say is announced, tables and all."""
        report = Report(
            "Released 9.7 MiB", ("Done.",), (Table("Causes", ("let go", "tensors"), (("models", "9.7 MiB"),)),)
        )
        (region,) = read(rendering.message(replace(plain, said=report))).content
        assert region.attributes["role"] == "status"
        assert region.text == "Released 9.7 MiBDone.Causeslet gotensorsmodels9.7 MiB"

    def test_nothing(self, plain):
        """Where there is nothing to say, nothing stands there."""
        assert rendering.message(plain) == ""


class TestAnswer:
    """What was found in a text."""

    def answer(self, device="cpu", show_text=True, seconds=0.0123):
        """Return the answer for a short note."""
        return {"answer": AnnotatedText("He has asthma.", (ENTITY,), "m", device, show_text), "seconds": seconds}

    def test_marked(self, read, plain):
        """The text is announced, its entities marked, each with its score for who listens, under their number, the device and the time."""
        (shown,) = read(rendering.answer(replace(plain, **self.answer()))).content
        assert shown.attributes == {"role": "status"}
        assert [one.text for one in shown.find("p")] == ["1 entity found by m on cpu in 12\N{NO-BREAK SPACE}ms"]
        assert [one.text for one in shown.find("mark")] == ["asthma DISEASE 0.900"]
        assert shown.find("table") == []

    def test_simulated(self, read, plain):
        """A time that was taken under a simulation is no time of MPS, and says so."""
        shown = read(rendering.answer(replace(plain, **self.answer("mps (SIMULATED)"))))
        assert [one.text for one in shown.find("p")] == [
            "1 entity found by m on mps (SIMULATED) in 12\N{NO-BREAK SPACE}ms",
            "SIMULATED MPS: no figure here is one of MPS.",
            "This answer is of mps (SIMULATED), and the device is cpu now. Click Annotate for another.",
        ]

    def test_nothing(self, plain):
        """Before the first text, nothing stands there."""
        assert rendering.answer(plain) == ""


HEX = r"#[0-9a-f]{6}"

DARK, DARK_ACCENT = "#212121", "#2196f3"
"""What JupyterLab's dark theme has for the ground and the accent."""


class TestStyleSheet:
    """Colours and rules."""

    def test_contrast_is_computed(self, contrast):
        """The function gives the figures of WCAG: 21 for black on white, and 4.48 for its well-known grey."""
        assert contrast("#000000", "#ffffff") == pytest.approx(21)
        assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)

    @pytest.mark.parametrize(("ink", "ground"), [(TEXT, GROUND), (GROUND, ACCENT), (DARK, DARK_ACCENT)])
    def test_text_can_be_read(self, contrast, ink, ground):
        """Text stands out by 4.5 to 1, on the panel and on the chosen button, also in JupyterLab's dark theme."""
        assert contrast(ink, ground) >= 4.5

    @pytest.mark.parametrize(
        ("colour", "ground"), [(VERMILION, GROUND), (VERMILION, DARK), (ACCENT, GROUND), (DARK_ACCENT, DARK)]
    )
    def test_shapes_can_be_seen(self, contrast, colour, ground):
        """Bars, lines, the frame of an error and the ring of the focus stand out by 3 to 1, on a white and on a dark ground."""
        assert contrast(colour, ground) >= 3

    def test_literal_colours_come_with_a_theme(self):
        """Every literal colour is one that was looked at, or stands in for one of the theme."""
        without_theme = re.sub(rf"var\(--[a-z0-9-]+, {HEX}\)", "", STYLE_SHEET)
        assert set(re.findall(HEX, without_theme)) == {VERMILION}

    def test_nothing_from_outside(self):
        """The sheet loads nothing, and holds no script."""
        assert not re.search(r"url\(|@import|https?:|<script|expression\(", STYLES)
        assert STYLES.count("<style>") == STYLES.count("</style>") == 1

    def test_classes_are_ours(self):
        """Every class in the panel's sheet is ours or one of the widgets, and every rule holds in a panel only."""
        rules = re.sub(r"@(media|container)[^{]*\{|@keyframes[^{]*\{(?:[^{}]*\{[^}]*\})*[^{}]*\}", "", STYLE_SHEET)
        selectors = [
            one.strip()
            for group in re.findall(r"([^{}]+)\{[^{}]*\}", rules)
            for one in re.split(r",(?![^(]*\))", group)
        ]
        selectors = [one.removeprefix("<style>").replace("}", "").strip() for one in selectors]
        ours = r"openmed-|widget-|jupyter-button|jupyter-widgets-disconnected|mod-active"
        assert len(selectors) > 40
        assert [one for one in selectors if not one.startswith(".openmed-panel")] == []
        assert [
            name for one in selectors for name in re.findall(r"\.([a-z][\w-]*)", one) if not re.match(ours, name)
        ] == []

    def test_every_class_has_a_rule(self):
        """Every class in the HTML has a rule in the sheet, but the one that MathJax heeds."""
        html = (
            page(full())
            + page(full(state="failed"))
            + rendering.activity(replace(full(), activity=None, cell_runs=True))
        )
        used = {name for names in re.findall(r'class="([^"]*)"', html) for name in names.split()}
        assert {name for name in used if f".{name}" not in STYLES} == {"tex2jax_ignore"}
        assert {"openmed-first", "openmed-bar", "openmed-error", "openmed-said", "openmed-late"} <= used

    def test_what_cannot_be_clicked_is_not_faint(self):
        """A button that cannot be clicked has full opacity and is struck through; one that is pressed is bold."""
        disabled = re.search(r"jupyter-button:disabled \{([^}]*)\}", STYLE_SHEET)
        pressed = re.search(r"jupyter-button\.mod-active \{([^}]*)\}", STYLE_SHEET)
        assert disabled
        assert "opacity: 1" in disabled[1]
        assert "line-through" in disabled[1]
        assert pressed
        assert "font-weight: 700" in pressed[1]

    def test_a_former_kernel(self):
        """A panel whose kernel was restarted says so in the place of everything else, and what to do."""
        assert "Run this cell again." in rendering.GONE
        assert ".openmed-panel.jupyter-widgets-disconnected > .openmed-region {\n  display: none;" in STYLE_SHEET
