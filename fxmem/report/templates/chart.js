// What both timelines are drawn with: axes, the most of each column of pixels, a peak that is
// marked, and a cursor that the pointer and the keyboard move.

const MARGIN = { left: 74, right: 14, top: 44, bottom: 46 };

// Of each column of pixels the operation with the most bytes: what is drawn does not hide a peak.
function pickColumns(sums, window, width) {
  const columns = new Int32Array(width), span = window.stop - window.start;
  for (let x = 0; x < width; x += 1) {
    const from = Math.floor(window.start + (x * span) / width);
    const to = Math.max(from + 1, Math.floor(window.start + ((x + 1) * span) / width));
    let best = from;
    for (let step = from + 1; step < to; step += 1) if (sums[step] > sums[best]) best = step;
    columns[x] = best;
  }
  return columns;
}

function chooseTicks(most) {
  let tick = 1;
  while (most / tick > 5) tick *= 2;
  return Array.from({ length: Math.floor(most / tick) + 1 }, (_, index) => index * tick);
}

class Chart {
  constructor(element, sums, top, onMove, onPick) {
    Object.assign(this, { element, sums, top, onMove, onPick });
    this.canvas = element.querySelector("canvas");
    this.cursor = element.querySelector(".cursor");
    this.window = { start: 0, stop: sums.length };
    this.step = 0;
    element.addEventListener("pointermove", (event) => this.point(event, false));
    element.addEventListener("pointerleave", () => this.move(this.step));
    element.addEventListener("click", (event) => this.point(event, true));
    element.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(element);
  }

  get width() { return Math.max(1, this.canvas.clientWidth - MARGIN.left - MARGIN.right); }
  get height() { return Math.max(1, this.canvas.clientHeight - MARGIN.top - MARGIN.bottom); }

  xOf(step) {
    return MARGIN.left + ((step - this.window.start) * this.width) / (this.window.stop - this.window.start);
  }

  yOf(nbytes) { return MARGIN.top + this.height * (1 - nbytes / this.top); }

  begin() {
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.canvas.clientWidth * scale);
    this.canvas.height = Math.round(this.canvas.clientHeight * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    this.columns = pickColumns(this.sums, this.window, Math.round(this.width));
    this.ink = readColor("ink");
    pen.textBaseline = "middle";
    pen.lineWidth = 1;
    pen.textAlign = "right";
    for (const tick of chooseTicks(this.top)) {
      const y = Math.round(this.yOf(tick)) + 0.5;
      pen.strokeStyle = readColor("line");
      pen.strokeRect(MARGIN.left, y, this.width, 0);
      pen.fillStyle = readColor("faint");
      pen.fillText(formatBytes(tick).replace(/\.00 /, " "), MARGIN.left - 8, y);
    }
    return pen;
  }

  // The outline of a sum over the columns, as steps.
  trace(pen, valueOf, columns = this.columns) {
    pen.beginPath();
    for (let x = 0; x < columns.length; x += 1) {
      const y = this.yOf(valueOf(columns[x]));
      pen.lineTo(MARGIN.left + x, y);
      pen.lineTo(MARGIN.left + x + 1, y);
    }
  }

  // A triangle on the peak with its text in a row above the plot.
  markPeak(pen, step, nbytes, text, row, color) {
    if (step < this.window.start || step >= this.window.stop) return;
    const x = Math.max(MARGIN.left, Math.min(this.xOf(step + 0.5), MARGIN.left + this.width));
    const y = this.yOf(nbytes), textY = 10 + 18 * row;
    pen.strokeStyle = pen.fillStyle = color;
    pen.setLineDash([4, 3]);
    pen.strokeRect(x, textY + 8, 0, MARGIN.top + this.height - textY - 8);
    pen.setLineDash([]);
    pen.beginPath();
    for (const [dx, dy] of [[-7, -12], [7, -12], [0, 0]]) pen.lineTo(x + dx, y + dy);
    pen.fill();
    pen.textAlign = "center";
    pen.font = "bold 13px system-ui, sans-serif";
    const half = 4 + pen.measureText(text).width / 2;
    const middle = Math.max(half, Math.min(x, this.canvas.clientWidth - half));
    pen.fillStyle = readColor("paper");
    pen.fillRect(middle - half, textY - 9, 2 * half, 18);
    pen.fillStyle = color;
    pen.fillText(text, middle, textY);
    pen.font = "12px system-ui, sans-serif";
  }

  markPhases(pen, phases) {
    const y = MARGIN.top + this.height;
    pen.textAlign = "center";
    let free = 0;
    phases.forEach(([name, start, stop], index) => {
      const from = Math.max(this.xOf(start), MARGIN.left);
      const to = Math.min(this.xOf(stop), MARGIN.left + this.width);
      if (to <= from) return;
      pen.fillStyle = readColor(index % 2 ? "line" : "panel");
      pen.fillRect(from, y + 1, to - from, 22);
      pen.fillStyle = pen.strokeStyle = this.ink;
      if (index) pen.strokeRect(Math.round(from) + 0.5, y, 0, 23);
      const half = pen.measureText(name).width / 2 + 4, middle = (from + to) / 2;
      if (2 * half <= to - from && middle - half >= free) {
        pen.fillText(name, middle, y + 12);
        free = middle + half;
      }
    });
  }

  point(event, picked) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left - MARGIN.left, y = event.clientY - box.top;
    const column = Math.max(0, Math.min(Math.floor(x), this.columns.length - 1));
    const step = this.columns[column];
    const nbytes = this.top * (1 - (y - MARGIN.top) / this.height);
    if (picked) this.step = step;
    this.show(step, { x: event.clientX - box.left, y, nbytes });
    if (picked && this.onPick) this.onPick(step, nbytes);
  }

  // Moves the cursor to an operation, which is shown until another is; scrolls there.
  move(step) {
    this.step = Math.max(0, Math.min(step, this.sums.length - 1));
    const { start, stop } = this.window, span = stop - start;
    if (this.step < start || this.step >= stop) this.look(this.step - span / 2, span);
    this.show(this.step, null);
  }

  look(start, span) {
    const size = Math.max(Math.min(10, this.sums.length), Math.min(Math.round(span), this.sums.length));
    const first = Math.max(0, Math.min(Math.round(start), this.sums.length - size));
    this.window = { start: first, stop: first + size };
    this.draw();
  }

  zoom(factor) {
    const span = (this.window.stop - this.window.start) * factor;
    this.look(this.step - span / 2, span);
    this.move(this.step);
  }

  show(step, pointer) {
    this.shown = step;
    this.element.setAttribute("aria-valuenow", step + 1);
    this.cursor.hidden = false;
    this.cursor.style.left = `${this.xOf(step + 0.5)}px`;
    this.onMove(step, pointer);
  }

  press(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const page = Math.max(1, Math.round((this.window.stop - this.window.start) / 20));
    const moves = {
      ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1,
      PageDown: -page, PageUp: page, Home: -Infinity, End: Infinity,
    };
    const done = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      p: () => this.move(this.peak), Enter: () => this.onPick && this.onPick(this.step, null),
    };
    if (event.key in moves) this.move(this.step + moves[event.key]);
    else if (event.key in done) done[event.key]();
    else return;
    event.preventDefault();
  }
}
