"""What is measured on a page: contrast, what sticks out, what an accessibility scan finds."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page

CONTRAST = """root => {
  const parse = text => { const m = text.match(/[\\d.]+/g).map(Number); return [m[0], m[1], m[2], m.length > 3 ? m[3] : 1]; };
  const over = (front, back) => [0, 1, 2].map(i => front[i] * front[3] + back[i] * (1 - front[3])).concat(1);
  const mix = (front, back, share) => [0, 1, 2].map(i => front[i] * share + back[i] * (1 - share)).concat(1);
  const light = color => { const v = color.slice(0, 3).map(x => { x /= 255; return x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4; });
    return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
  const ratio = element => {
    const chain = []; for (let e = element; e; e = e.parentElement) chain.unshift(e);
    let back = [255, 255, 255, 1]; const layers = [];
    for (const e of chain) { const style = getComputedStyle(e);
      layers.unshift([back, Number(style.opacity)]); back = over(parse(style.backgroundColor), back); }
    let front = over(parse(getComputedStyle(element).color), back);
    for (const [behind, opacity] of layers) { front = mix(front, behind, opacity); back = mix(back, behind, opacity); }
    const [low, high] = [light(front), light(back)].sort((a, b) => a - b);
    return (high + .05) / (low + .05); };
  const found = [];
  const visible = e => e.checkVisibility({opacityProperty: true, visibilityProperty: true}) && e.getClientRects().length;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) { const text = walker.currentNode.data.trim(), e = walker.currentNode.parentElement;
    if (text && e.tagName !== 'STYLE' && visible(e)) found.push([text, ratio(e)]); }
  for (const e of root.querySelectorAll('textarea, input:not([type=checkbox])')) if (e.value && visible(e)) found.push([e.value, ratio(e)]);
  return found; }"""
"""The contrast of each visible text by WCAG 2.2 (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio), all layers and
opacities counted in. Inside of JupyterLab's outputs axe leaves contrast undecided, so it is computed here."""

STICKING_OUT = """root => {
  const edge = root.getBoundingClientRect(), out = [];
  for (const e of root.querySelectorAll('*')) {
    const box = e.getBoundingClientRect(), name = `${e.tagName.toLowerCase()} ${(e.innerText || e.getAttribute('class') || '').slice(0, 40)}`;
    if (!box.width || !box.height || !e.checkVisibility()) continue;
    if (box.right > edge.right + 1 || box.left < edge.left - 1) out.push(`${name}: goes beyond the panel`);
    const style = getComputedStyle(e);
    if (e.scrollWidth > e.clientWidth + 1 && style.overflowX !== 'visible' && style.display !== 'inline') out.push(`${name}: is cut off or scrolls`);
  }
  return out; }"""

BROKEN_APART = """root => {
  const out = [], walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (!node.parentElement.checkVisibility()) continue;
    for (const match of node.data.matchAll(/\\d\\s(ms|s|bytes|[KMGT]iB)\\b/g)) {
      range.setStart(node, match.index); range.setEnd(node, match.index + match[0].length);
      if (new Set([...range.getClientRects()].filter(one => one.width).map(one => Math.round(one.top))).size > 1)
        out.push(node.data.slice(0, 60));
    } }
  return out; }"""


def contrasts(panel: Locator) -> dict[str, float]:
    """Return the contrast of each visible text, the lowest where a text is there more than once."""
    panel.page.mouse.move(1, 1)  # What is under the mouse has a color of its own.
    lowest: dict[str, float] = {}
    for text, ratio in panel.evaluate(CONTRAST):
        lowest[text] = min(ratio, lowest.get(text, ratio))
    return lowest


def sticking_out(panel: Locator) -> list[str]:
    """Return the elements that overflow the panel or are clipped inside it."""
    return list(panel.evaluate(STICKING_OUT))


GRAVE = ("serious", "critical")
"""What is a mistake in every page."""


def findings(page: Page, selector: str, impacts: Collection[str] = ("minor", "moderate", *GRAVE)) -> list[str]:
    """Return the findings of axe-core inside of an element that have one of some impacts."""
    violations: list[dict[str, Any]] = Axe().run(page, context=selector).response["violations"]
    return [
        f"{violation['impact']} {violation['id']}: {node['html']}"
        for violation in violations
        if violation["impact"] in impacts
        for node in violation["nodes"]
    ]
