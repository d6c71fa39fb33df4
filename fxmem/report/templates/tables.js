// The tables: what is alive at the peak, the modules, and the timeline for who does not see it.

const ROWS_SHOWN = 100;
const ROWS_OF_TIMELINE = 120;

const COLUMNS = [
  { name: "bytes", number: true, of: (i) => sizeOf(i, data.peak), show: (i) => formatBytes(sizeOf(i, data.peak)) },
  { name: "category", of: categoryOf },
  { name: "name", of: (i) => labelOf(i, data.peak), names: true },
  { name: "shape", of: (i) => (i === NONE ? "" : textOf(storages.shape[i])) },
  { name: "dtype", of: (i) => (i === NONE ? "" : textOf(storages.dtype[i])) },
  { name: "born in", number: true, of: (i) => (i === NONE ? data.peak : storages.born[i]),
    show: (i) => nameBirth(i === NONE ? data.peak : storages.born[i]) },
  { name: "saved by", names: true, of: (i) => (i === NONE ? "" : storages.saved[i].map((by) => textOf(nodes.name[by])).join(", ")) },
  { name: "source", of: (i) => {
    const node = i === NONE ? operations.node[data.peak] : storages.node[i];
    return node === NONE ? "" : shortSource(textOf(nodes.source[node]));
  } },
];

const nameBirth = (step) => (step < 0 ? "before the step" : `${phaseOf(step)} ${step + 1}`);

class LiveTable {
  constructor(table) {
    this.rows = listAlive(data.peak);
    this.sort = { column: COLUMNS[0], down: true };
    this.most = ROWS_SHOWN;
    this.heads = COLUMNS.map((column) => {
      const button = make("button", { type: "button", className: "plain", textContent: column.name,
        onclick: () => this.sortBy(column) });
      return make("th", { scope: "col", className: column.number ? "number" : "" }, button);
    });
    this.body = make("tbody");
    table.append(make("thead", {}, make("tr", {}, ...this.heads)), this.body);
    const used = categories.filter((name) => this.rows.some((index) => categoryOf(index) === name));
    find("category").append(...used.map((name) => make("option", { value: name, textContent: name })));
    find("filter").addEventListener("input", () => this.show());
    find("category").addEventListener("input", () => this.show());
    find("more").addEventListener("click", () => { this.most = Infinity; this.show(); });
    this.show();
  }

  sortBy(column) {
    const down = this.sort.column === column ? !this.sort.down : Boolean(column.number);
    this.sort = { column, down };
    this.show();
  }

  select() {
    const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const category = find("category").value, { column, down } = this.sort;
    const kept = this.rows.filter((index) => {
      if (category && categoryOf(index) !== category) return false;
      if (!words.length) return true;
      const told = COLUMNS.map((each) => (each.show || each.of)(index)).join(" ").toLowerCase();
      return words.every((word) => told.includes(word));
    });
    const compare = (a, b) => (column.number ? a - b : a.localeCompare(b, "en", { numeric: true }));
    const keyed = kept.map((index) => [column.of(index), index]);
    keyed.sort(([a], [b]) => (down ? compare(b, a) : compare(a, b)));
    return keyed.map(([, index]) => index);
  }

  show() {
    const kept = this.select();
    this.heads.forEach((head, index) => {
      const isSorted = COLUMNS[index] === this.sort.column;
      head.setAttribute("aria-sort", isSorted ? (this.sort.down ? "descending" : "ascending") : "none");
      const arrow = isSorted ? (this.sort.down ? " \u2193" : " \u2191") : "";
      head.firstChild.textContent = COLUMNS[index].name + arrow;
    });
    this.body.replaceChildren(...kept.slice(0, this.most).map((index) => this.makeRow(index)));
    const nbytes = kept.reduce((sum, index) => sum + sizeOf(index, data.peak), 0);
    find("found").textContent = `${kept.length} of ${this.rows.length}, ${formatBytes(nbytes)}`;
    find("more").hidden = kept.length <= this.most;
    find("more").textContent = `Show all ${kept.length}`;
  }

  makeRow(index) {
    const cells = COLUMNS.map((column) => {
      const text = (column.show || column.of)(index);
      const cell = make("td", { className: column.number ? "number" : column.names ? "names" : "" });
      if (column.name === "name" && index !== NONE) cell.append(this.makeToggle(index));
      else cell.textContent = text;
      return cell;
    });
    return make("tr", {}, ...cells);
  }

  // A storage's life opens below its row, and is marked in the timeline.
  makeToggle(index) {
    const button = make("button", { type: "button", className: "plain", "aria-expanded": "false",
      textContent: textOf(storages.label[index]) });
    button.addEventListener("click", () => {
      const row = button.closest("tr"), isOpen = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!isOpen));
      if (isOpen) { row.nextSibling.remove(); return; }
      const cell = make("td", { colSpan: COLUMNS.length }, describeLife(index));
      row.after(make("tr", { className: "detail" }, cell));
      choose(index);
    });
    return button;
  }
}

// -- modules -------------------------------------------------------------------------------------

const SUMS = ["parameters", "output", "saved", "alive at peak", "forward", "backward"];
const FLOPS_FROM = 4;

class ModuleTree {
  constructor(table) {
    const rows = data.modules;
    this.ends = rows.map((_, index) => this.findEnd(rows, index));
    this.open = new Set([0]);
    const peakNode = operations.node[data.peak];
    const atPeak = peakNode === NONE ? NONE : rows.findIndex((row) => row[2] === peakNode);
    rows.forEach((_, index) => {
      if (index < atPeak && atPeak < this.ends[index]) this.open.add(index);
    });
    this.peak = atPeak;
    const heads = ["module or operation", ...SUMS];
    table.append(
      make("thead", {}, make("tr", {}, ...heads.map((name, index) =>
        make("th", { scope: "col", className: index ? "number" : "", textContent: name })))),
      this.body = make("tbody"));
    find("open-all").addEventListener("click", () => this.openAll(true));
    find("close-all").addEventListener("click", () => this.openAll(false));
    this.show();
  }

  findEnd(rows, index) {
    let end = index + 1;
    while (end < rows.length && rows[end][1] > rows[index][1]) end += 1;
    return end;
  }

  openAll(isOpen) {
    this.open = new Set(isOpen ? data.modules.keys() : [0]);
    this.show();
  }

  show() {
    const shown = [];
    for (let index = 0; index < data.modules.length;) {
      shown.push(this.makeRow(index));
      index = this.open.has(index) ? index + 1 : this.ends[index];
    }
    this.body.replaceChildren(...shown);
  }

  makeRow(index) {
    const [name, level, node, ...sums] = data.modules[index];
    const text = index === 0 ? "the model" : textOf(name);
    const target = node === NONE ? "" : textOf(nodes.target[node]);
    const label = target && target !== text ? `${text} (${target})` : text;
    const head = make("th", { scope: "row" });
    head.style.paddingLeft = `${level * 1.1}rem`;
    if (this.ends[index] > index + 1) {
      head.append(make("button", { type: "button", className: "fold", textContent: label,
        "aria-expanded": String(this.open.has(index)), "aria-label": `${label}, level ${level + 1}`,
        onclick: () => this.toggle(index) }));
    } else {
      head.append(make("span", { className: "leaf", textContent: label }));
    }
    if (index === this.peak) head.append(make("span", { className: "mark", textContent: " \u25C6 peak" }));
    const cells = sums.map((sum, at) => make("td", { className: "number",
      textContent: sum ? (at < FLOPS_FROM ? formatBytes(sum) : formatFlops(sum)) : "" }));
    return make("tr", { "data-row": index }, head, ...cells);
  }

  toggle(index) {
    if (!this.open.delete(index)) this.open.add(index);
    this.show();
    this.body.querySelector(`[data-row="${index}"] button`).focus();
  }
}

// -- the timeline as a table ---------------------------------------------------------------------

function fillSteps() {
  const columns = pickColumns(totals, { start: 0, stop: STEPS }, Math.min(STEPS, ROWS_OF_TIMELINE));
  const heads = ["operation", "phase", "of", "alive", ...categories];
  const rows = Array.from(new Set(columns), (step) => {
    const node = operations.node[step];
    const cells = [
      `${step + 1}${step === data.peak ? " (peak)" : ""}`, phaseOf(step),
      node === NONE ? textOf(operations.name[step]) : textOf(nodes.name[node]),
      formatBytes(totals[step]), ...bands.map((band) => formatBytes(band[step])),
    ];
    return make("tr", {}, ...cells.map((text, at) =>
      make("td", { className: at > 2 ? "number" : "", textContent: text })));
  });
  const caption = STEPS > rows.length ? "The operation with the most bytes in each part of the step" : "Every operation";
  find("steps").querySelector("div").replaceChildren(make("table", {},
    make("caption", { textContent: caption }),
    make("thead", {}, make("tr", {}, ...heads.map((name) => make("th", { scope: "col", textContent: name })))),
    make("tbody", {}, ...rows)));
}
