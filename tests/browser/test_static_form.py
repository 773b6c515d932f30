"""Where no kernel answers, the same notebook shows the state as tables, with what to type: no dead widget, no empty box."""

import re

import nbformat
import pytest
from nbconvert import HTMLExporter
from playwright.sync_api import expect

from helpers import front_ends

pytestmark = pytest.mark.slow

TYPED = "%openmed_device --reset"
"""A command that the static form tells."""

NOTE = "Synthetic words that nobody should find in the file."
VIEW = "application/vnd.jupyter.widget-view+json"


def count_cells_to_panel(notebook):
    """Return the number of cells up to the first that shows the panel."""
    is_panel = [cell.source.startswith("%openmed_panel") for cell in notebook.cells]
    return is_panel.index(True) + 1


@pytest.fixture(scope="module")
def saved(server, new_page, shipped):
    """The shipped notebook as JupyterLab saves it after Run All, a text typed into the panel and annotated."""
    front = front_ends.Lab(server, new_page(), shipped("static_form"))
    front.run_all()
    front.region("Try it").get_by_role("textbox").fill(NOTE)
    front.button("Annotate").click()
    expect(front.region("Try it")).to_contain_text("Model: bundled_small")
    front.save()
    front.page.close()
    return nbformat.read(server.notebooks / front.name, as_version=4)


@pytest.fixture(scope="module")
def reopened(saved, server, new_page):
    """The file opened in JupyterLab as one that came from elsewhere, with a new kernel in which nothing ran."""
    saved = nbformat.from_dict({**saved, "metadata": {**saved.metadata, "title": "From elsewhere"}})
    nbformat.write(saved, server.notebooks / "elsewhere.ipynb")
    return front_ends.Lab(server, new_page(), "elsewhere.ipynb")


def test_reopened_notebook_shows_the_static_form(reopened):
    """A notebook that was not run, trusted or not, shows tables and commands instead of the panel."""
    output = reopened.page.locator(".jp-OutputArea-output").filter(has_text=TYPED).first

    expect(output.get_by_role("table").filter(has_text="cpu").first).to_be_visible()
    expect(output).to_contain_text("Equivalent commands")
    expect(reopened.panels).to_have_count(0)
    assert "model not found" not in reopened.page.locator(".jp-Notebook").inner_text().lower()


def test_panel_is_interactive_after_its_cell_ran_again(reopened, saved):
    """The cells that are run again bring the widgets back."""
    reopened.run_cells(count_cells_to_panel(saved))
    expect(reopened.panel).to_be_visible()
    reopened.device_button("cpu").click()

    reopened.expect_kernel("__import__('openmed_nb').device().requested_by", "the panel")


def test_panel_says_that_the_kernel_was_restarted(reopened, saved):
    """When the kernel is restarted the panel says that its cell has to be run again, in the place of what is true no more."""
    reopened.page.get_by_role("menuitem", name="Kernel", exact=True).click()
    reopened.page.get_by_role("menuitem", name="Restart Kernel…").click()
    reopened.page.get_by_role("button", name="Confirm Kernel Restart").click()

    expect(reopened.panel).to_have_text(
        re.compile(r"^\s*The kernel was restarted; .* Run this cell again\.\s*$"), use_inner_text=True
    )
    expect(reopened.panel.get_by_role("button")).to_have_count(0)
    reopened.run_cells(count_cells_to_panel(saved))
    expect(reopened.panel.get_by_role("button", name="Annotate")).to_be_visible()


def test_html_export_shows_the_static_form_offline(saved, new_page, tmp_path):
    """The page that nbconvert makes shows the tables without a network, and nothing of widgets."""
    page = new_page()
    (tmp_path / "panel.html").write_text(HTMLExporter().from_notebook_node(saved)[0], "utf-8")
    page.context.set_offline(True)
    page.goto((tmp_path / "panel.html").as_uri(), wait_until="commit")
    form = page.locator(".openmed-nb").filter(has_text=TYPED).first

    expect(form.get_by_role("table").first).to_be_visible()
    expect(form).to_contain_text("Equivalent commands")
    assert "VBox(" not in page.locator("body").inner_text()
