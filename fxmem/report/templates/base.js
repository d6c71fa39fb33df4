// What the page was given, and what all parts of it use. Texts come from models and files that
// nobody has checked: they reach the page as text alone, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const { storages, operations, nodes, categories } = data;
const NONE = -1;
const STEPS = operations.name.length;
const WORKSPACE = categories.length - 1;
const find = (id) => document.getElementById(id);
const textOf = (index) => (index === NONE ? "" : data.texts[index]);

function make(tag, fields = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// As Python rounds: a tie, which is a multiple of 1/8 or 1/4, goes to the even digit.
function round(value, digits) {
  const isTie = Math.abs((value * 2 ** (digits + 1)) % 2) === 1, scale = 10 ** digits;
  const floor = Math.floor(value * scale);
  return (isTie && floor % 2 === 0 ? floor / scale : value).toFixed(digits);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function formatBytes(nbytes) {
  let value = Math.abs(nbytes), unit = 0;
  while (value >= 1023.995 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return `${nbytes < 0 ? "-" : ""}${unit ? round(value, 2) : value} ${UNITS[unit]}`;
}

function formatFlops(flops) {
  let value = flops;
  for (const unit of ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"]) {
    if (value < 999.995) return `${unit === "FLOP" ? value : round(value, 2)} ${unit}`;
    value /= 1000;
  }
  return `${round(value, 2)} PFLOP`;
}

const formatShare = (share) => `${round(100 * share, 1)} %`;

// The most bytes during each operation, by category: what is born in it or before and dies in it
// or after, and the workspace of its kernel.
function sumLives(steps, lives, workspace, groups, groupOf) {
  const bands = Array.from({ length: groups }, () => new Float64Array(steps + 1));
  lives.bytes.forEach((nbytes, index) => {
    const band = bands[groupOf(index)];
    band[Math.max(lives.born[index], 0)] += nbytes;
    if (lives.died[index] !== NONE) band[lives.died[index] + 1] -= nbytes;
  });
  for (const band of bands) for (let step = 1; step < steps; step += 1) band[step] += band[step - 1];
  workspace.forEach((nbytes, step) => { bands[groups - 1][step] += nbytes; });
  return bands;
}

const bands = sumLives(STEPS, storages, operations.workspace, categories.length,
  (index) => storages.category[index]);
const totals = Float64Array.from({ length: STEPS },
  (_, step) => bands.reduce((sum, band) => sum + band[step], 0));

function isAlive(index, step) {
  const died = storages.died[index];
  return storages.born[index] <= step && (died === NONE || died >= step) && storages.bytes[index] > 0;
}

// Largest first; a kernel's workspace is no storage and has the index NONE.
function listAlive(step) {
  const alive = [];
  for (let index = 0; index < storages.bytes.length; index += 1) {
    if (isAlive(index, step)) alive.push(index);
  }
  if (operations.workspace[step]) alive.push(NONE);
  return alive.sort((a, b) => sizeOf(b, step) - sizeOf(a, step));
}

const sizeOf = (index, step) => (index === NONE ? operations.workspace[step] : storages.bytes[index]);
const labelOf = (index, step) =>
  index === NONE ? `workspace of ${textOf(operations.name[step])}` : textOf(storages.label[index]);
const categoryOf = (index) => categories[index === NONE ? WORKSPACE : storages.category[index]];
const phaseOf = (step) => data.phases.find(([, start, stop]) => start <= step && step < stop)[0];
const shortSource = (source) => source.split(/[\\/]/).pop();

function describeStep(step) {
  const node = operations.node[step];
  const source = node === NONE ? "" : shortSource(textOf(nodes.source[node]));
  const of = node === NONE ? "" : ` of ${textOf(nodes.name[node])}`;
  const place = `${phaseOf(step)}${of}${source ? ` (${source})` : ""}`;
  return `${step === data.peak ? "Peak, operation" : "Operation"} ${step + 1} of ${STEPS}: ${place}`;
}

// -- colours and patterns ------------------------------------------------------------------------

function readColor(name) {
  const probe = document.body.appendChild(make("span"));
  probe.style.color = `var(--${name})`;
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}

// A category has a pattern besides its colour: lines in one of four directions, crossed, or dots.
function makePattern(context, color, hatch) {
  const size = 8, tile = make("canvas", { width: size, height: size }), pen = tile.getContext("2d");
  pen.fillStyle = color;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = pen.fillStyle = readColor("hatch");
  const lines = {
    "|": [[4.5, 0, 4.5, 8]], "-": [[0, 4.5, 8, 4.5]],
    "/": [[-2, 2, 2, -2], [-1, 9, 9, -1], [6, 10, 10, 6]],
    "\\": [[-2, 6, 2, 10], [-1, -1, 9, 9], [6, -2, 10, 2]],
  };
  for (const stroke of hatch) {
    if (stroke === ".") pen.fillRect(3, 3, 2, 2);
    for (const [x, y, toX, toY] of lines[stroke] || []) {
      pen.beginPath();
      pen.moveTo(x, y);
      pen.lineTo(toX, toY);
      pen.stroke();
    }
  }
  return context.createPattern(tile, "repeat");
}
