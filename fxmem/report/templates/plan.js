// The step before and with a plan, over each other, and the trade-offs.

class Overlay extends Chart {
  constructor(element) {
    const { planned } = data, steps = planned.operation.length;
    const again = new Set(planned.again);
    const [after] = sumLives(steps, planned, planned.workspace, 1, () => 0);
    // Recomputation takes no time without the plan: there the line goes on as it was.
    const before = new Float64Array(steps);
    for (let step = 0; step < steps; step += 1) {
      before[step] = again.has(step) ? before[step - 1] : totals[planned.operation[step]];
    }
    const most = before.map((nbytes, step) => Math.max(nbytes, after[step]));
    super(element, most, most.reduce((a, b) => Math.max(a, b)) * 1.04 || 1,
      (step) => this.tell(step), null);
    Object.assign(this, { before, after, again });
    this.peak = this.findPeak(after);
    element.setAttribute("aria-valuemin", 1);
    element.setAttribute("aria-valuemax", steps);
  }

  findPeak(sums) { return sums.reduce((best, nbytes, step) => (nbytes > sums[best] ? step : best), 0); }

  draw() {
    const pen = this.begin(), width = this.columns.length;
    const columns = pickColumns(this.after.subarray(0, this.sums.length), this.window, width);
    this.trace(pen, (step) => this.after[step], columns);
    pen.lineTo(MARGIN.left + width, this.yOf(0));
    pen.lineTo(MARGIN.left, this.yOf(0));
    pen.fillStyle = makePattern(pen, readColor("after"), ["/"]);
    pen.fill();
    this.trace(pen, (step) => this.before[step], pickColumns(this.before, this.window, width));
    pen.strokeStyle = this.ink;
    pen.lineWidth = 2;
    pen.setLineDash([6, 4]);
    pen.stroke();
    pen.setLineDash([]);
    pen.lineWidth = 1;
    this.markAgain(pen);
    const peak = this.findPeak(this.before);
    this.markPeak(pen, peak, this.before[peak],
      `Before, dashed: ${formatBytes(this.before[peak])}`, 0, readColor("peak"));
    this.markPeak(pen, this.peak, this.after[this.peak],
      `With the plan, filled: ${formatBytes(this.after[this.peak])}`, 1, readColor("ink"));
    if (this.shown !== undefined) this.cursor.style.left = `${this.xOf(this.shown + 0.5)}px`;
  }

  // Below the plot: where operations run that the plan recomputes.
  markAgain(pen) {
    const y = MARGIN.top + this.height;
    pen.fillStyle = makePattern(pen, readColor("after"), ["/", "\\"]);
    for (const step of this.again) {
      if (step < this.window.start || step >= this.window.stop) continue;
      pen.fillRect(this.xOf(step), y + 2, Math.max(1, this.xOf(step + 1) - this.xOf(step)), 14);
    }
    pen.fillStyle = this.ink;
    pen.textAlign = "left";
    const text = this.again.size ? "hatched: recomputed" : "nothing is recomputed";
    pen.fillText(text, MARGIN.left, y + 28);
  }

  tell(step) {
    const what = describeStep(data.planned.operation[step]).replace(/^Peak, operation/, "Operation");
    const again = this.again.has(step) ? ", recomputed" : "";
    const text = `${what}${again}: ${formatBytes(this.before[step])} before, ` +
      `${formatBytes(this.after[step])} with the plan`;
    find("overlay-moment").textContent = text;
    this.element.setAttribute("aria-valuetext", text);
  }
}

// Ticks of 1, 2 or 5 times a power of ten.
function chooseShares(longest) {
  const power = 10 ** Math.floor(Math.log10(longest / 5));
  const tick = power * [1, 2, 5, 10].find((factor) => longest / (factor * power) <= 5);
  return Array.from({ length: Math.floor(longest / tick) + 1 }, (_, index) => index * tick);
}

function drawCurve(svg) {
  const box = { left: 84, right: 524, top: 24, bottom: 272 }, { front } = data;
  const all = data.chosen ? [...front, data.chosen] : front;
  const most = Math.max(...all.map((plan) => plan.peak)) * 1.05;
  const longest = Math.max(...all.map((plan) => plan.overhead)) * 1.05 || 1;
  const x = (plan) => box.left + (plan.overhead / longest) * (box.right - box.left);
  const y = (plan) => box.bottom - (plan.peak / most) * (box.bottom - box.top);
  const add = (tag, fields, text = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(fields)) element.setAttribute(name, value);
    element.textContent = text;
    svg.append(element);
    return element;
  };
  for (const tick of chooseTicks(most)) {
    const at = y({ peak: tick });
    add("line", { class: "axis", x1: box.left, x2: box.right, y1: at, y2: at });
    add("text", { x: box.left - 8, y: at + 4, "text-anchor": "end" }, formatBytes(tick).replace(".00 ", " "));
  }
  for (const share of chooseShares(longest)) {
    add("text", { x: x({ overhead: share }), y: box.bottom + 20, "text-anchor": "middle" },
      formatShare(share));
  }
  add("text", { x: (box.left + box.right) / 2, y: box.bottom + 42, "text-anchor": "middle" }, "more time for a step");
  add("text", { x: box.left, y: 12 }, "peak");
  add("polyline", { class: "line", points: front.map((plan) => `${x(plan)},${y(plan)}`).join(" ") });
  for (const plan of front) {
    const point = add("circle", { class: "point", cx: x(plan), cy: y(plan), r: 5 });
    point.append(document.createElementNS("http://www.w3.org/2000/svg", "title"));
    point.firstChild.textContent = `${formatBytes(plan.peak)}, ${formatShare(plan.overhead)} more time`;
  }
  if (!data.chosen) return;
  const [cx, cy] = [x(data.chosen), y(data.chosen)];
  add("path", { class: "chosen", d: `M${cx} ${cy - 9}L${cx + 9} ${cy}L${cx} ${cy + 9}L${cx - 9} ${cy}Z` });
  // In the corner that a front leaves free: less memory takes more time.
  add("text", { x: box.right, y: 12, "text-anchor": "end" },
    `\u25c6 this plan: ${formatBytes(data.chosen.peak)}, ${formatShare(data.chosen.overhead)}`);
}
