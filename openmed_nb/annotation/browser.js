// The browser of notes. It draws the state that the kernel sends, and sends what the user does.
// Offsets are counted in code points as in Python, not in UTF-16 code units.

function element(tag, properties = {}, ...children) {
  const created = Object.assign(document.createElement(tag), properties);
  created.dataset.lmSuppressShortcuts = "true"; // Keys in a focused element are not commands of JupyterLab and Notebook 7.
  created.append(...children);
  return created;
}

// Replace the children of an element, and keep the focus on the control with the same key.
function redraw(parent, children) {
  const key = parent.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  parent.replaceChildren(...children);
  if (key) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

function chip(name, color) {
  const mark = element("span", { className: "openmed-chip", textContent: name });
  mark.style.backgroundColor = color;
  return mark;
}

// Return the number of characters of the note before a point of the document. Labels are in "small", and are not part of the note.
function offset(note, node, position) {
  const range = document.createRange();
  range.setStart(note, 0);
  range.setEnd(node, position);
  const before = range.cloneContents();
  before.querySelectorAll("small").forEach((label) => label.remove());
  return [...before.textContent].length;
}

function render({ model, el }) {
  el.addEventListener("keydown", (event) => event.stopPropagation());
  let pending = 0; // Number of actions that the kernel has not handled.
  const send = (action, values = {}) => {
    pending += 1;
    el.setAttribute("aria-busy", "true");
    // The kernel may display another note before it handles this action.
    model.send({ action, note: state.note, ...values });
  };
  const button = (text, onclick, properties = {}) => element("button", { type: "button", textContent: text, onclick, ...properties });
  let state = model.get("state");
  let selection = null;

  const search = element("input", { type: "search", placeholder: "Search, then press Enter" });
  let query = state.query;
  search.onchange = () => {
    if (search.value === query) return; // Enter causes both events.
    query = search.value;
    send("search", { query });
  };
  search.onsearch = search.onchange;
  const searchField = element("label", {}, "Search", search);
  const labels = element("fieldset", {}, element("legend", { textContent: "Labels" }));
  const labelBoxes = element("div", { className: "openmed-boxes" });
  labels.append(labelBoxes);
  labels.hidden = state.labels.length === 0;
  const boxes = state.labels.map(({ name }) => element("input", { type: "checkbox", value: name, onchange: () => filter() }));
  labelBoxes.append(...state.labels.map(({ name, count, color }, index) =>
    element("label", {}, boxes[index], chip(name, color), count.toLocaleString("en"))));
  const score = element("input", { type: "range", min: 0, max: 1, step: 0.01 });
  const scoreValue = element("span");
  const context = element("select", { onchange: () => filter() });
  context.append(...["", ...Object.keys(state.contexts).filter((name) => state.contexts[name])].map((value) =>
    element("option", { value, textContent: value ? `${value} (${state.contexts[value].toLocaleString("en")})` : "all" })));
  const contextField = element("label", { hidden: context.length === 1 }, "Context", context);
  const filter = () => {
    const hidden = boxes.filter((box) => !box.checked).map((box) => box.value);
    send("filter", { hidden, min_score: score.valueAsNumber, context: context.value });
  };
  score.oninput = () => { scoreValue.textContent = score.valueAsNumber.toFixed(2); };
  score.onchange = filter;
  const title = element("p", { className: "openmed-title" });
  const details = element("div", { className: "openmed-details" });
  const filters = element("div", { className: "openmed-filters" }, searchField, labels, contextField,
    element("label", {}, "Minimum score", element("span", {}, score, scoreValue)));

  // A select with one row would be a menu.
  const list = element("select", { size: Math.max(2, Math.min(state.total, 12)), ariaLabel: "Notes" });
  list.onchange = () => send("move", { position: Number(list.value) });
  const previous = button("Previous", () => send("move", { position: state.position - 1 }));
  const next = button("Next", () => send("move", { position: state.position + 1 }));
  const name = element("input", { type: "text" });
  name.onchange = () => send("find", { name: name.value });
  const status = element("p", { role: "status" });
  const alert = element("p", { role: "alert" });
  const note = element("div", { className: "openmed-note" });
  const pager = element("div", { className: "openmed-pager" }, previous, next, element("label", {}, "Note", name), status);

  const entities = element("div", { className: "openmed-entities", role: "group", ariaLabel: "Entities" });
  const missed = element("input", { type: "text", placeholder: "Select it in the note, or type it" });
  missed.oninput = () => { selection = null; };
  const label = element("select");
  const add = button("Add", () => {
    send("add", { text: missed.value, start: null, end: null, ...selection, label: label.value });
    missed.value = "";
    selection = null;
  });
  const allRight = button("All right", () => send("all right"));
  const finish = button("", () => send("finish", { finished: !state.review.finished }), { className: "openmed-finish" });
  const notice = element("p");
  const review = element("div", { className: "openmed-review" }, entities,
    element("div", { className: "openmed-pager" }, element("label", {}, "Missed entity", missed), element("label", {}, "Label", label), add),
    element("div", { className: "openmed-pager" }, allRight, finish), notice);

  // A selection in the note fills in the missed entity.
  const select = () => {
    const selected = el.getRootNode().getSelection?.() ?? document.getSelection();
    const text = note.querySelector("[dir]");
    if (!state.review || !text || !selected.rangeCount || selected.isCollapsed || !text.contains(selected.anchorNode)) return;
    const range = selected.getRangeAt(0);
    if (!text.contains(range.endContainer)) range.setEnd(text, text.childNodes.length);
    selection = { start: offset(text, range.startContainer, range.startOffset), end: offset(text, range.endContainer, range.endOffset) };
    missed.value = selected.toString().trim();
  };
  document.addEventListener("selectionchange", select);

  const entityRow = (entity, index) => {
    const { start, end, label: name } = entity;
    const mark = (right) => send("mark", { start, end, label: name, right });
    const row = element("fieldset", {}, element("legend", {}, entity.text, " ", chip(name, entity.color)));
    if (entity.missed) {
      row.append("Missed ", button("Remove", () => mark(null), { ariaLabel: `Remove ${entity.text}` }));
    } else {
      for (const [text, right] of [["Right", true], ["Wrong", false]]) {
        const radio = element("input", { type: "radio", name: `${model.model_id ?? ""}${index}`, checked: entity.right === right });
        radio.dataset.key = `${start} ${end} ${name} ${text}`;
        radio.onchange = () => mark(right);
        row.append(element("label", {}, radio, text));
      }
    }
    return row;
  };

  let drawn = null;
  const draw = () => {
    state = model.get("state");
    searchField.hidden = state.query === null;
    if (pending <= 1) { // Otherwise, the user has changed a filter since.
      if (document.activeElement !== search) search.value = state.query ?? "";
      score.value = state.min_score;
      scoreValue.textContent = state.min_score.toFixed(2);
      context.value = state.context;
      state.labels.forEach(({ shown }, index) => { boxes[index].checked = shown; });
    }
    title.textContent = state.title;
    details.hidden = state.details.length === 0;
    details.replaceChildren(...state.details.map((textContent) => element("p", { textContent })));
    filters.hidden = state.review !== null;
    list.replaceChildren(...state.rows.map(([name, detail], index) =>
      element("option", { value: state.first + index, textContent: `${name}: ${detail}`, selected: state.first + index === state.position })));
    previous.disabled = state.position <= 0;
    next.disabled = state.position >= state.count - 1;
    name.value = state.name;
    status.textContent = state.status;
    alert.textContent = state.alert;
    if (state.html !== drawn) {
      note.innerHTML = state.html;
      note.querySelectorAll("[tabindex]").forEach((box) => { box.dataset.lmSuppressShortcuts = "true"; });
      drawn = state.html;
      selection = null; // It has the offsets of the previous note.
      missed.value = "";
    }
    review.hidden = state.review === null;
    if (state.review) {
      redraw(entities, state.review.entities.map(entityRow));
      const chosen = label.value;
      label.replaceChildren(...state.review.labels.map((name) => element("option", { textContent: name, selected: name === chosen })));
      allRight.disabled = state.review.unmarked === 0;
      finish.disabled = state.review.unmarked > 0;
      finish.textContent = state.review.finished ? "Reviewed. Undo" : "This note is reviewed";
      notice.textContent = state.review.notice;
    }
  };
  el.append(title, details, filters, element("div", { className: "openmed-columns" }, list, element("div", {}, pager, alert, note, review)));
  draw();
  model.on("change:state", draw);
  model.on("msg:custom", () => {
    pending = Math.max(pending - 1, 0);
    if (pending) return;
    el.removeAttribute("aria-busy");
    query = state.query;
  });
  return () => document.removeEventListener("selectionchange", select);
}

export default { render };
