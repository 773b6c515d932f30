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
  const focused = parent.getRootNode().activeElement;
  const key = parent.contains(focused) ? focused.dataset.key : null;
  parent.replaceChildren(...children);
  if (key) parent.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

function chip(name, color, context = "") {
  const mark = element("span", { className: "openmed-chip", textContent: context ? `${name}, ${context}` : name });
  mark.classList.toggle("openmed-context", Boolean(context));
  mark.style.backgroundColor = color;
  return mark;
}

// The keys of a review, and those of the columns of context. "u" undoes, so "c" is the key of "uncertain".
const KEYS = {
  a: "all right, next note", x: "entity is wrong", Space: "next note", u: "undo", "↑ ↓": "select an entity", "← →": "change the note",
  m: "type a missed entity",
};
const CONTEXT_KEYS = { negated: "n", uncertain: "c", temporality: "t", experiencer: "e" };

// Return the characters of the note before a point of the document. Labels are in "small", and are not part of the note.
function charactersBefore(note, node, position) {
  const range = document.createRange();
  range.setStart(note, 0);
  range.setEnd(node, position);
  const before = range.cloneContents();
  before.querySelectorAll("small").forEach((label) => label.remove());
  return [...before.textContent];
}

// Mark the hits of a search in the note, in upper or lower case. A hit may start or end inside of an entity, but has no label.
function markHits(note, query) {
  const hasNoLabel = (node) => node.parentElement.closest("small") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT;
  const walker = document.createTreeWalker(note, NodeFilter.SHOW_TEXT, hasNoLabel);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  const pattern = query.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&").replace(/ss|ß/gi, "(?:ss|ß)").replace(/['’‘`´]/g, "['’‘`´]").replace(/\s+/g, "\\s+");
  const hits = [...nodes.map(({ data }) => data).join("").matchAll(new RegExp(pattern, "giu"))].reverse();
  let position = 0;
  for (const node of nodes) {
    const { length } = node;
    for (const { index, 0: hit } of hits) { // From the end, because the text before a mark stays in the node.
      const start = Math.max(index - position, 0);
      const end = Math.min(index - position + hit.length, length);
      if (start >= end) continue;
      const range = document.createRange();
      range.setStart(node, start);
      range.setEnd(node, end);
      range.surroundContents(element("mark", { className: "openmed-hit" }));
    }
    position += length;
  }
  const box = note.querySelector("[role=region]"); // A long note is displayed from its first hit.
  const first = box?.querySelector(".openmed-hit");
  if (first) box.scrollTop += first.getBoundingClientRect().top - box.getBoundingClientRect().top - 24;
}

function render({ model, el }) {
  let pending = 0; // Number of actions that the kernel has not handled.
  const send = (action, values = {}) => {
    if (el.matches(".jupyter-widgets-disconnected")) {
      alert.scrollIntoView({ block: "nearest" });
      return;
    }
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
  // Scores above 0.995 are displayed as 1.00, and few of them equal 1.
  const score = element("input", { type: "range", min: 0, max: 0.99, step: 0.01 });
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

  const main = element("div", { className: "openmed-main" });
  const activeElement = () => el.getRootNode().activeElement;
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
  let isAdding = false;
  const missed = element("input", { type: "text", placeholder: "Select it in the note, or type it" });
  missed.oninput = () => { selection = null; };
  const label = element("select");
  const add = button("Add", () => {
    send("add", { text: missed.value, start: null, end: null, ...selection, label: label.value });
    isAdding = true; // The text remains until it is added, so that a correction of it is not typed as keys.
    selection = null;
  });
  const accept = button("", () => send("accept"), { className: "openmed-accept", ariaKeyShortcuts: "A" });
  const undo = button("Undo", () => send("undo"), { ariaKeyShortcuts: "U" });
  const reopen = button("Not reviewed", () => send("finish", { finished: false }));
  const notice = element("p");
  const missedPager = element("div", { className: "openmed-pager" }, element("label", {}, "Missed entity", missed), element("label", {}, "Label", label), add);
  const review = element("div", { className: "openmed-review" }, entities, missedPager,
    element("div", { className: "openmed-pager" }, accept, undo, reopen), notice);
  // After a click with a mouse, Space is the key of the review again instead of that of the button.
  review.addEventListener("click", ({ detail, target }) => {
    if (detail && target.matches("button")) (target.closest("fieldset") ?? main).focus();
  });
  const keyList = element("ul", { ariaLabel: "Keys" });
  // Without the focus, keys are commands of the notebook.
  const keys = element("div", { className: "openmed-keys", onclick: () => main.focus() },
    element("p", { className: "openmed-hint", textContent: "Click here to use the keys" }), keyList);

  // A selection in the note fills in the missed entity.
  const select = () => {
    const selected = el.getRootNode().getSelection?.() ?? document.getSelection();
    const text = note.querySelector("[dir]");
    if (!state.review || !text || !selected.rangeCount || selected.isCollapsed || !text.contains(selected.anchorNode)) return;
    const range = selected.getRangeAt(0);
    if (!text.contains(range.endContainer)) range.setEnd(text, text.childNodes.length);
    const start = charactersBefore(text, range.startContainer, range.startOffset).length;
    const selectedCharacters = charactersBefore(text, range.endContainer, range.endOffset).slice(start);
    selection = { start, end: start + selectedCharacters.length };
    missed.value = selectedCharacters.join("").trim().replace(/\s+/g, " ");
  };
  document.addEventListener("selectionchange", select);

  const keyOf = ({ start, end, label }) => `${start} ${end} ${label}`;
  let selected = 0; // Index of the entity that keys change.
  const isTitleOf = ({ title }, { start, end }) => new RegExp(`characters ${start} to ${end}\\b`).test(title);
  const selectEntity = (index) => {
    selected = Math.max(0, Math.min(index, entities.children.length - 1));
    [...entities.children].forEach((row, number) => { row.ariaCurrent = number === selected; });
    note.querySelectorAll("[title]").forEach((shown) => {
      const found = state.review.entities.filter((entity) => isTitleOf(shown, entity));
      shown.classList.toggle("openmed-selected", found.includes(state.review.entities[selected]));
      shown.classList.toggle("openmed-wrong", found.length > 0 && found.every(({ right }) => right === false));
    });
  };
  // A click on an entity in the note selects it.
  note.addEventListener("click", ({ target }) => {
    const shown = target.closest("[title]");
    const index = shown && state.review ? state.review.entities.findIndex((entity) => isTitleOf(shown, entity)) : -1;
    if (index >= 0) selectEntity(index);
  });
  const moveSelection = (step) => {
    selectEntity(selected + step);
    entities.children[selected]?.focus();
    note.querySelector(".openmed-selected")?.scrollIntoView({ block: "nearest" }); // A long note has a scroll bar.
  };
  const mark = (entity, right, context = {}) => {
    if (entity) send("mark", { start: entity.start, end: entity.end, label: entity.label, right, context });
  };
  const entityRow = (entity, index) => {
    const key = keyOf(entity);
    const row = element("fieldset", { tabIndex: -1 }, element("legend", {}, entity.text, " ", chip(entity.label, entity.color, entity.context_mark)));
    row.dataset.key = key;
    row.addEventListener("focusin", () => selectEntity(index));
    const append = (name, control) => {
      control.dataset.key = `${key} ${name}`;
      row.append(control.matches("button") ? control : element("label", {}, ...(control.matches("select") ? [name, control] : [control, name])));
    };
    if (entity.missed) {
      row.append("Missed");
      append("Remove", button("Remove", () => mark(entity, null), { ariaLabel: `Remove ${entity.text}` }));
    } else {
      for (const [name, right] of [["Right", true], ["Wrong", false]]) {
        const pressed = entity.right === right;
        append(name, button(name, () => mark(entity, pressed ? null : right), { ariaPressed: pressed }));
      }
    }
    for (const [column, values] of entity.right === false ? [] : Object.entries(state.review.context_values)) {
      const value = entity.context[column];
      if (typeof value === "boolean") {
        append(column, element("input", { type: "checkbox", checked: value, onchange: () => mark(entity, true, { [column]: !value }) }));
      } else {
        const choice = element("select", { onchange: () => mark(entity, true, { [column]: choice.value }) });
        choice.append(...values.map((name) => element("option", { textContent: name, selected: name === value })));
        append(column, choice);
      }
    }
    return row;
  };

  const actions = {
    a: () => accept.click(),
    x: () => {
      const entity = state.review.entities[selected];
      mark(entity, entity?.missed ? null : false);
    },
    " ": () => send("next"),
    u: () => undo.click(),
    m: () => missed.focus(),
    enter: () => { if (missed.value) add.click(); },
    arrowup: () => moveSelection(-1),
    arrowdown: () => moveSelection(1),
    arrowleft: () => previous.click(),
    arrowright: () => next.click(),
  };
  for (const [column, values] of Object.entries(state.review?.context_values ?? {})) {
    actions[CONTEXT_KEYS[column]] = () => {
      if (pending) return; // The next value depends on the state after the change.
      const entity = state.review.entities[selected];
      if (entity && entity.right !== false) mark(entity, true, { [column]: values[(values.indexOf(entity.context[column]) + 1) % values.length] });
    };
  }
  el.addEventListener("keydown", (event) => {
    event.stopPropagation();
    const { key, target } = event;
    if (!state.review || event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    if (target.matches("input[type=text]")) {
      if (key !== "Escape" && (key !== "Enter" || target !== missed)) return;
      if (key === "Enter") add.click();
      else main.focus();
    } else {
      const isNative = target.matches("select") && (target !== list || key.startsWith("Arrow"));
      const action = actions[key.toLowerCase()];
      if (!action || isNative || (target.matches("button, input") && [" ", "Enter"].includes(key))) return;
      // A key that is held down marks one note.
      if (!event.repeat || key.startsWith("Arrow")) action();
    }
    event.preventDefault();
  });

  let drawn = null;
  let marked = null; // Query whose hits are marked.
  const draw = () => {
    const hadFocus = el.contains(activeElement());
    const isOtherNote = model.get("state").note !== state.note;
    const shown = new Set(state.review?.entities.map(keyOf));
    state = model.get("state");
    // The keys then change the entity that was added.
    const added = isAdding && !state.alert ? state.review.entities.findIndex((entity) => !shown.has(keyOf(entity))) : -1;
    if (isOtherNote) selected = 0;
    else if (added >= 0) selected = added;
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
    (isAdding ? missedPager : pager).after(alert);
    alert.textContent = state.alert;
    if (state.html !== drawn || state.query !== marked) {
      note.innerHTML = state.html;
      if (state.query) markHits(note, state.query);
      note.querySelectorAll("[tabindex]").forEach((box) => { box.dataset.lmSuppressShortcuts = "true"; });
      drawn = state.html;
      marked = state.query;
      selection = null; // It has the offsets of the previous note.
      missed.value = "";
    }
    review.hidden = state.review === null;
    if (state.review) {
      redraw(entities, state.review.entities.map(entityRow));
      const chosen = label.value;
      label.replaceChildren(...state.review.labels.map((name) => element("option", { textContent: name, selected: name === chosen })));
      const all = state.review.entities.some(({ right }) => right === false) ? "Others" : "All";
      accept.textContent = state.review.unmarked ? `${all} right, next` : "Reviewed, next";
      reopen.hidden = !state.review.finished;
      notice.textContent = state.review.notice;
      selectEntity(selected);
    }
    if (isAdding && state.alert) missed.select();
    else if (isAdding && activeElement() === missed) main.focus();
    isAdding = false;
    // Keys would be commands of the notebook if the focus was lost.
    if (hadFocus && (!el.contains(activeElement()) || activeElement().disabled)) main.focus();
    // The start of the note is above the window after a click below a long note.
    if (isOtherNote && hadFocus && activeElement() !== list) pager.scrollIntoView({ block: "nearest" });
  };
  const keyNames = { ...KEYS };
  for (const column of Object.keys(state.review?.context_values ?? {})) keyNames[CONTEXT_KEYS[column]] = column;
  keyList.append(...Object.entries(keyNames).map(([key, text]) => element("li", {}, element("kbd", { textContent: key }), ` ${text}`)));
  keys.hidden = state.review === null;
  main.tabIndex = state.review ? 0 : -1;
  if (state.review) Object.assign(main, { role: "group", ariaLabel: "Review" });
  main.append(pager, alert, note, review);
  el.append(title, details, filters, element("div", { className: "openmed-columns" }, list, main, keys));
  draw();
  model.on("change:state", draw);
  model.on("msg:custom", () => {
    pending = Math.max(pending - 1, 0);
    if (pending) return;
    el.removeAttribute("aria-busy");
    query = state.query;
  });
  // The comm ends when the kernel restarts, also after it died. A view of anywidget does not show this.
  model.on("comm_live_update", () => {
    el.classList.add("jupyter-widgets-disconnected");
    el.removeAttribute("aria-busy");
    alert.textContent = "The kernel was restarted. Run the cells above and this cell again.";
  });
  return () => document.removeEventListener("selectionchange", select);
}

export default { render };
