"""The HTML of the panel: what each region says, that nothing from outside is read as HTML, and that all can be read."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import simulated_computers as computers
from helpers.annotations import make_text
from helpers.html import PAYLOADS, read
from openmed_nb._events.activity import ProgressEvent
from openmed_nb._render.display import Report, Table
from openmed_nb.devices.choice import DeviceChoice, DeviceList, DeviceStatus, Explanation
from openmed_nb.devices.environment import HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE, plan_mps_variables
from openmed_nb.devices.request import DeviceSetting
from openmed_nb.errors import OpenMedError
from openmed_nb.models.store import LoadedModelInfo, LoadedModels
from openmed_nb.notebook.panel import view
from openmed_nb.notebook.panel.state import MemoryBar, MemoryPart, PanelState, read_state
from openmed_nb.notebook.panel.view import STYLE_SHEET, STYLES

REGIONS = (
    view.render_status,
    view.render_devices,
    view.render_environment,
    view.render_memory,
    view.render_models,
    view.render_activity,
    view.render_message,
    view.render_annotation,
)
GIB = 1 << 30
ENTITY = {"entity_group": "DISEASE", "score": 0.9, "word": "asthma", "start": 7, "end": 13}


@pytest.fixture
def plain():
    """What there is to see of a computer without a GPU."""
    return replace(PanelState(**read_state(computers.plain().session)), simulated=False)


def full(words="words", state="usable"):
    """Return a state in which every text from outside is the same words, and every region has something to show."""
    choice = DeviceChoice(words, words, words, words, confirmed=True)
    error = OpenMedError(words, words)
    candidates = (DeviceStatus(words), DeviceStatus("cpu"))
    table = Table(words, (words, words), ((words, words),))
    return PanelState(
        DeviceList(candidates, choice),
        Explanation(
            (DeviceSetting(words, words),),
            choice,
            plan_mps_variables({HIGH_WATERMARK_VARIABLE: words, LOW_WATERMARK_VARIABLE: "0.5"}),
            {words: words},
        ),
        (MemoryBar(words, (MemoryPart(words, GIB), MemoryPart(words, GIB)), 4 * GIB, words),),
        LoadedModels((LoadedModelInfo(words, words, words, GIB, follows_session=True),)),
        activity=ProgressEvent(words, words, 0, 2),
        error=error if state == "failed" else None,
        result=Report(words, (words,), (table,)),
        annotation=make_text(f"He has {words}", ENTITY | {"entity_group": words}, model=words, device=words),
    )


def cases(plain):
    """Return the state for each thing that the panel may have to say, by name, with the region that says it."""
    gpu = MemoryBar("mps", (MemoryPart("allocated", GIB), MemoryPart("cached", 2 * GIB)), 8 * GIB, "the limit")
    result = Report("Released 9.7 MiB", ("Done.",), (Table("Causes", ("released",), (("models",),)),))
    model = LoadedModelInfo("bundled", "mps (SIMULATED)", "float32", 3 << 20, follows_session=True)
    loading = ProgressEvent("Moving to mps", "bundled", 1, 3)
    answer = make_text("He has asthma.", ENTITY, model="m", seconds=0.0123)
    simulated = make_text("He has asthma.", ENTITY, model="m", device="mps (SIMULATED)", seconds=0.0123)
    mac = read_state(computers.mac().session)["devices"]
    explained = {
        environ: replace(plain.explanation, environment=plan_mps_variables(dict([environ])))
        for environ in ((HIGH_WATERMARK_VARIABLE, "0.7"), (HIGH_WATERMARK_VARIABLE, "0,7"))
    }
    nothing = replace(plain.devices, choice=None)
    failed = replace(plain.explanation, choice=OpenMedError("It broke.", "Mend it."))
    changes = {
        "device of a simulation": (view.render_status, {"simulated": True}),
        "no device": (view.render_status, {"devices": nothing, "explanation": failed}),
        "variables": (
            view.render_environment,
            {"devices": mac, "explanation": explained[HIGH_WATERMARK_VARIABLE, "0.7"]},
        ),
        "variables without MPS": (view.render_environment, {}),
        "variables that need a remedy": (
            view.render_environment,
            {"devices": mac, "explanation": explained[HIGH_WATERMARK_VARIABLE, "0,7"]},
        ),
        "memory": (view.render_memory, {"memory": (gpu,)}),
        "memory without a limit": (
            view.render_memory,
            {"memory": (MemoryBar("mps", (MemoryPart("", GIB),), 0, ""),)},
        ),
        "memory over its limit": (view.render_memory, {"memory": (replace(gpu, limit=GIB),)}),
        "no model": (view.render_models, {}),
        "models": (view.render_models, {"models": LoadedModels((model,))}),
        "no activity": (view.render_activity, {}),
        "an activity": (view.render_activity, {"activity": loading}),
        "a click that waits": (view.render_activity, {"pending_clicks": 2, "activity": loading}),
        "nothing said": (view.render_message, {}),
        "something said": (view.render_message, {"result": result}),
        "an error": (view.render_message, {"error": OpenMedError("It broke.", "Mend it."), "result": result}),
        "no answer": (view.render_annotation, {}),
        "an answer": (view.render_annotation, {"annotation": answer}),
        "an answer of a simulation": (
            view.render_annotation,
            {"annotation": simulated},
        ),
    }
    return {name: (region, replace(plain, **changed)) for name, (region, changed) in changes.items()}


def test_regions_are_as_recorded(plain, as_recorded):
    """Each region is what the record has, but for the styles of tables and marks; the record is read by people."""
    shown = {}
    for name, (region, state) in cases(plain).items():
        html = region(state)
        read(html)
        shown[name] = re.sub(r' style="(?!width)[^"]*"', "", html)

    as_recorded("panel.json", shown)


@pytest.mark.parametrize("state", ["usable", "failed"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_payload_in_any_place_of_a_region_is_shown_as_text(payload, state):
    shown = full(payload, state)
    for region in REGIONS:
        assert payload in read(region(shown)).text, region


@given(words=st.text(min_size=1, max_size=30).filter(str.strip), state=st.sampled_from(["usable", "failed"]))
def test_any_words_bring_no_element_or_attribute(words, state):
    for region in REGIONS:
        assert read(region(full(words, state))).text


@pytest.mark.parametrize("spelling", ["cpu Device: mps, chosen", "<strong>mps</strong>"])
def test_words_like_ours_are_no_device(plain, spelling):
    """Only the active device is bold, whatever the value of a variable looks like."""
    refused = PanelState(**read_state(computers.plain(OPENMED_DEVICE=spelling).session))
    choice = DeviceChoice("cpu", spelling, "you", "Yes.", confirmed=True)
    chosen = replace(
        plain,
        devices=replace(plain.devices, choice=choice),
        explanation=replace(plain.explanation, choice=choice),
    )

    assert read(view.render_status(refused)).find("strong") == []
    assert [bold.text for bold in read(view.render_status(chosen)).find("strong")] == ["cpu"]


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


def test_style_sheet_every_class_has_a_rule(plain):
    """Every class in the HTML has a rule in the sheet, except for the one that MathJax reads."""
    html = "".join(region(state) for region, state in cases(plain).values())
    used = {name for names in re.findall(r'class="([^"]*)"', html) for name in names.split()}
    assert {name for name in used if f".{name}" not in STYLES} == {"tex2jax_ignore"}
    assert {"openmed-first", "openmed-bar", "openmed-error", "openmed-result", "openmed-late"} <= used
