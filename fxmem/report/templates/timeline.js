// The stacked timeline, what is alive at an operation, and the life of a storage.

const LARGEST = 8;
let chosen = null;

class Timeline extends Chart {
  constructor(element) {
    super(element, totals, totals[data.peak] * 1.04 || 1,
      (step, pointer) => showMoment(step, pointer, this), (step, nbytes) => pickAt(step, nbytes));
    this.tip = element.querySelector(".tip");
    this.peak = data.peak;
    element.setAttribute("aria-valuemin", 1);
    element.setAttribute("aria-valuemax", STEPS);
  }

  draw() {
    const pen = this.begin();
    const patterns = categories.map((name, index) => makePattern(pen, readColor(name), data.hatches[index]));
    // From the top of the stack to its bottom: each covers what lies below it.
    const below = Float64Array.from(this.columns, (step) => totals[step]);
    for (let band = categories.length - 1; band >= 0; band -= 1) {
      let x = 0;
      this.trace(pen, () => below[x++]);
      pen.lineTo(MARGIN.left + this.columns.length, this.yOf(0));
      pen.lineTo(MARGIN.left, this.yOf(0));
      pen.fillStyle = patterns[band];
      pen.fill();
      this.columns.forEach((step, column) => { below[column] -= bands[band][step]; });
    }
    this.trace(pen, (step) => totals[step]);
    pen.strokeStyle = this.ink;
    pen.stroke();
    this.markPhases(pen, data.phases);
    if (chosen !== null) this.markLife(pen);
    this.markPeak(pen, data.peak, totals[data.peak],
      `Peak ${formatBytes(totals[data.peak])} in ${phaseOf(data.peak)}`, 0, readColor("peak"));
    if (this.shown !== undefined) this.cursor.style.left = `${this.xOf(this.shown + 0.5)}px`;
  }

  markLife(pen) {
    const last = storages.died[chosen] === NONE ? STEPS : storages.died[chosen] + 1;
    const from = Math.max(this.xOf(Math.max(storages.born[chosen], 0)), MARGIN.left);
    const to = Math.min(this.xOf(last), MARGIN.left + this.width);
    if (to < from) return;
    const y = MARGIN.top + this.height + 30;
    pen.fillStyle = pen.strokeStyle = this.ink;
    pen.fillRect(from, y + 3, Math.max(2, to - from), 4);
    pen.strokeRect(from, y, 0, 10);
    pen.strokeRect(Math.max(from + 2, to), y, 0, 10);
  }
}

// The storage of a category's band that lies at a height of the stack.
function findAt(step, nbytes) {
  let rest = nbytes;
  if (rest < 0) return null;
  for (let band = 0; band < categories.length; band += 1) {
    if (rest >= bands[band][step]) { rest -= bands[band][step]; continue; }
    for (let index = 0; index < storages.bytes.length; index += 1) {
      if (storages.category[index] !== band || !isAlive(index, step)) continue;
      if (rest < storages.bytes[index]) return index;
      rest -= storages.bytes[index];
    }
    return NONE;
  }
  return null;
}

// Enter takes the largest, as no pointer says which.
function pickAt(step, nbytes) {
  const index = nbytes === null ? listAlive(step)[0] : findAt(step, nbytes);
  if (index !== null && index !== undefined && index !== NONE) choose(index);
}

function choose(index) {
  chosen = index;
  const title = make("h3", { textContent: textOf(storages.label[index]) });
  find("life").replaceChildren(title, describeLife(index));
  timeline.draw();
}

function describeLife(index) {
  const at = (step) => `${describeStep(step)}, ${textOf(operations.name[step])}`;
  const { born, died, used, saved } = storages, node = storages.node[index];
  const rows = [
    ["size", `${formatBytes(storages.bytes[index])} (${storages.bytes[index].toLocaleString("en")} bytes)`],
    ["category", categoryOf(index)],
    ["tensor", `${textOf(storages.shape[index])} ${textOf(storages.dtype[index])}`],
    ["born", born[index] < 0 ? "before the step" : at(born[index])],
    ["last used", used[index] === NONE ? "never read in the step" : at(used[index])],
    ["freed", died[index] === NONE ? "outlives the step" : `after ${at(died[index]).replace(/^./, (c) => c.toLowerCase())}`],
    ["saved by", saved[index].map((by) => textOf(nodes.name[by])).join(", ") || "nothing"],
    ["source", (node !== NONE && textOf(nodes.source[node])) || "none"],
  ];
  const list = make("dl");
  for (const [name, text] of rows) {
    list.append(make("dt", { textContent: name }), make("dd", { textContent: text }));
  }
  return list;
}

function showMoment(step, pointer, chart) {
  const alive = listAlive(step), total = totals[step], title = describeStep(step);
  const operator = textOf(operations.name[step]);
  find("moment-title").textContent = `${title}, ${operator}: ${formatBytes(total)}`;
  chart.element.setAttribute("aria-valuetext", `${title}, ${formatBytes(total)}`);
  legendRows.forEach(({ size, share }, band) => {
    const nbytes = bands[band][step];
    size.textContent = formatBytes(nbytes);
    share.textContent = total ? formatShare(nbytes / total) : "";
  });
  find("largest").replaceChildren(...alive.slice(0, LARGEST).map((index) => {
    const text = `${formatBytes(sizeOf(index, step))} ${categoryOf(index)} `;
    if (index === NONE) return make("li", {}, text, labelOf(index, step));
    return make("li", {}, text, makeLink(index));
  }));
  const rest = alive.slice(LARGEST).reduce((sum, index) => sum + sizeOf(index, step), 0);
  find("others").textContent =
    alive.length > LARGEST ? `and ${alive.length - LARGEST} more, ${formatBytes(rest)}` : "";
  showTip(step, pointer, chart, title);
}

function showTip(step, pointer, chart, title) {
  chart.tip.hidden = pointer === null;
  if (pointer === null) return;
  const under = findAt(step, pointer.nbytes);
  const lines = [`${formatBytes(totals[step])} alive`, title];
  if (under !== null) {
    lines.push(`Here: ${labelOf(under, step)}, ${categoryOf(under)}, ${formatBytes(sizeOf(under, step))}`);
  }
  chart.tip.replaceChildren(...lines.map((line) => make("div", { textContent: line })));
  const isRight = pointer.x > chart.canvas.clientWidth / 2;
  chart.tip.style.left = isRight ? "auto" : `${pointer.x + 14}px`;
  chart.tip.style.right = isRight ? `${chart.canvas.clientWidth - pointer.x + 14}px` : "auto";
  const isLow = pointer.y > chart.canvas.clientHeight / 2;
  chart.tip.style.top = isLow ? "auto" : `${pointer.y + 12}px`;
  chart.tip.style.bottom = isLow ? `${chart.canvas.clientHeight - pointer.y + 12}px` : "auto";
}

function makeLink(index) {
  return make("button", {
    type: "button", className: "plain", textContent: textOf(storages.label[index]),
    onclick: () => choose(index),
  });
}

// The legend is the table of what each category takes at the cursor.
const legendRows = categories.map((name) => {
  const swatch = make("canvas", { width: 26, height: 16, "aria-hidden": "true" });
  const size = make("td", { className: "number" }), share = make("td", { className: "number" });
  const row = make("tr", {}, make("th", { scope: "row" }, swatch, name), size, share);
  return { row, size, share, swatch };
});

function paintLegend() {
  legendRows.forEach(({ swatch }, index) => {
    const pen = swatch.getContext("2d");
    pen.fillStyle = makePattern(pen, readColor(categories[index]), data.hatches[index]);
    pen.fillRect(0, 0, 26, 16);
  });
}
