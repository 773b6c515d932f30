"""Tests that names, labels, variables and texts with HTML remain text in the live panel."""

import json
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

import openmed_nb

pytestmark = pytest.mark.slow

PAYLOAD = "<img src=x onerror=window.__ran=1>"
"""An image that is not there; where it is taken for HTML, its handler runs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder whose name is the payload, with a model whose label is the payload too."""
    folder = tmp_path_factory.mktemp("models") / PAYLOAD
    shutil.copytree(Path(openmed_nb.__file__).parent / "models" / "bundled" / "disease_small", folder)
    text = (folder / "config.json").read_text("utf-8")
    (folder / "config.json").write_text(text.replace("DISEASE", json.dumps(PAYLOAD)[1:-1]), "utf-8")
    return str(folder)


@pytest.fixture(scope="module")
def opened(open_panel, model):
    """A notebook in JupyterLab with a panel for that model."""
    return open_panel("lab", model=model)


@pytest.fixture
def front(opened):
    """The same page; afterwards the session is as it began, and nothing is noted as run."""
    yield opened
    opened.run("import os\nos.environ.pop('HF_ENDPOINT', None)")
    opened.begin_again()
    opened.page.evaluate("delete window.__ran")


def expect_nothing_ran(front):
    """Expect that no payload ran, after the time in which an image would have failed to load."""
    front.page.wait_for_timeout(300)
    assert front.page.evaluate("window.__ran") is None


def test_model_and_labels_remain_text(front):
    """Tables, highlights, tooltips and buttons show the name and the labels of a model as text."""
    front.region("Try it").get_by_role("textbox").fill(f"{PAYLOAD} has asthma")
    front.button("Annotate").click()

    expect(front.region("Try it").locator("mark").first).to_contain_text(PAYLOAD)
    expect(front.region("Try it")).to_contain_text(f"{PAYLOAD} has asthma")
    front.region("Models").get_by_text("1 model loaded").click()
    expect(front.region("Models").get_by_role("table")).to_contain_text(PAYLOAD)
    expect(front.region("Models").get_by_role("button").filter(has_text=PAYLOAD)).to_be_visible()
    expect_nothing_ran(front)


def test_variable_remains_text(front):
    """So is the value of an environment variable, in the table of variables."""
    front.run(f"import os\nos.environ['HF_ENDPOINT'] = {PAYLOAD!r}\npanel.model.refresh()")

    expect(front.region("Environment")).to_contain_text(PAYLOAD)
    expect_nothing_ran(front)


def test_unescaped_payload_runs(front):
    """The same text as the HTML of a widget runs, so the tests above would see it."""
    front.run(f"before = panel.children[0].value\npanel.children[0].value = {PAYLOAD!r}")

    front.wait_until(lambda: front.page.evaluate("window.__ran") == 1)
    front.run("panel.children[0].value = before")
