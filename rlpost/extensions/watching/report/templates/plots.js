// Plots, drawn from data-plot: tooltips, zoom, logarithmic scale, hours instead of steps. A view applies to all plots
// of the page.

const plots = $all("svg.plot");
const shared = document.querySelector("[data-hours]");
const hours = shared ? JSON.parse(shared.dataset.hours) : [];
const view = { axis: "steps", log: false, from: null, to: null };
const meanings = { saved: "checkpoints", resume: "later attempts resumed here" };
const number = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });

function short(value) {
  if (value === 0) return "0";
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + letter;
  }
  return Math.abs(value) >= 1e-3 ? String(Number(value.toPrecision(3))) : value.toExponential(1).replace(".0e", "e");
}

// Round numbers that cover low..high: multiples of 1, 2 or 5 times a power of ten.
function ticks(low, high, about = 4) {
  if (!(high > low)) [low, high] = low ? [low - Math.abs(low) * 0.1, low + Math.abs(low) * 0.1] : [0, 1];
  const rough = (high - low) / about;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 5].find((size) => size * power >= rough * (1 - 1e-9)) ?? 10) * power;
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, n) => (first + n) * step);
}

function decades(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.max(first + 1, Math.ceil(Math.log10(high)));
  const by = Math.ceil((last - first) / 6);
  return Array.from({ length: Math.ceil((last - first) / by) + 1 }, (_, n) => 10 ** (first + n * by));
}

// The place of a step on the horizontal axis: the step, or hours since submission between the two nearest known.
function place(step, run = 0) {
  const known = hours[run] ?? [];
  if (view.axis === "steps" || !known.length) return step;
  let low = 0, high = known.length - 1;
  if (step <= known[0][0]) return known[0][1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (known[middle][0] <= step) low = middle; else high = middle;
  }
  const [[a, x], [b, y]] = [known[low], known[high]];
  return b > a ? x + Math.min(1, (step - a) / (b - a)) * (y - x) : y;
}

const parsed = new WeakMap();
function data(plot) {
  if (!parsed.has(plot)) parsed.set(plot, JSON.parse(plot.dataset.plot));
  return parsed.get(plot);
}

// Curves as [x, y, step] within the view; a point on each side stays, so that lines reach the edge.
function visible(points, run) {
  const from = view.from ?? -Infinity, to = view.to ?? Infinity;
  const placed = points.map(([step, value]) => [place(step, run), value, step]);
  const first = placed.findIndex(([x]) => x >= from);
  if (first < 0) return [];
  let last = placed.length - 1;
  while (last > 0 && placed[last][0] > to) last -= 1;
  return placed.slice(Math.max(0, first - 1), last + 2);
}

function layout(plot) {
  const { box, curves, stacked } = data(plot);
  const drawn = curves.map((curve) => ({ ...curve, points: visible(curve.points, curve.run),
    soft: curve.soft && visible(curve.soft, curve.run),
    lost: (curve.lost ?? []).map(([step, word]) => [place(step, curve.run), word, step]) }));
  const from = view.from ?? -Infinity, to = view.to ?? Infinity;
  const inside = drawn.flatMap(({ points }) => points.filter(([x]) => x >= from && x <= to));
  const xs = [...inside.map(([x]) => x), ...drawn.flatMap(({ lost }) => lost.map(([x]) => x))];
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  let low = view.from ?? least(xs), high = view.to ?? most(xs);
  if (!Number.isFinite(low)) low = 0;
  if (!(high > low)) high = low + 1;
  let values = inside.map(([, y]) => y);
  if (stacked) {
    const sums = new Map();
    for (const [x, y] of inside) sums.set(x, (sums.get(x) ?? 0) + y);
    values = [0, ...sums.values()];
  }
  // A plot with negative values stays linear; zeros are on the lower edge of a logarithmic one.
  const positive = values.filter((value) => value > 0);
  const isLog = view.log && !stacked && positive.length > 0 && values.every((value) => value >= 0);
  const bottom = values.length ? least(values) : 0, top = values.length ? most(values) : 1;
  const ys = isLog ? decades(least(positive), top) : ticks(bottom, top);
  const scale = isLog ? (value) => Math.log10(Math.max(value, ys[0])) : (value) => value;
  const [left, right, above, below, width, height] = box;
  const y0 = scale(ys[0]), y1 = scale(ys.at(-1));
  return { drawn, ys, low, high, stacked, box,
    x: (value) => left + (value - low) / (high - low) * (width - left - right),
    y: (value) => height - below - (scale(value) - y0) / (y1 - y0 || 1) * (height - above - below) };
}

const near = (places, gap) => places.sort((a, b) => a - b).reduce((kept, at) => (kept.length && at - kept.at(-1) < gap ? kept : [...kept, at]), []);

// Only numbers and our own words come into the markup.
function draw(plot) {
  const now = layout(plot);
  const { drawn, ys, low, high, stacked, x, y } = now;
  const [left, right, above, below, width, height] = now.box;
  const path = (points) => points.map(([px, py]) => `${x(px).toFixed(1)} ${y(py).toFixed(1)}`).join("L");
  const axis = [], parts = [];
  for (const value of ys) {
    const at = y(value).toFixed(1), step = ys.length > 1 ? Math.abs(ys[1] - ys[0]) : 1;
    axis.push(`<path class="grid" d="M${left} ${at}H${width - right}"/>`);
    axis.push(`<text x="${left - 6}" y="${Number(at) + 4}" text-anchor="end">${short(Math.abs(value) < step * 1e-6 && !view.log ? 0 : value)}</text>`);
  }
  for (const value of ticks(low, high, 5)) {
    if (value < low - 1e-9 || value > high + 1e-9 || (view.axis === "steps" && value !== Math.round(value))) continue;
    axis.push(`<text x="${x(value).toFixed(1)}" y="${height - 8}" text-anchor="middle">${short(Math.abs(value) < 1e-9 ? 0 : value)}${view.axis === "hours" ? " h" : ""}</text>`);
  }
  let tops = new Map();
  for (const { points, soft, colour, dots, lost } of drawn) {
    const inside = points.filter(([px]) => px >= low && px <= high);
    const crosses = [true, false].flatMap((isAbove) =>
      near(lost.filter(([px, word]) => (word === "∞") === isAbove && px >= low && px <= high).map(([px]) => x(px)), 3)
        .map((at) => `M${(at - 3).toFixed(1)} ${(isAbove ? above : height - below) - 3}l6 6m0 -6l-6 6`));
    if (crosses.length) parts.push(`<path class="lost" d="${crosses.join("")}"/>`);
    if (stacked) {
      const upper = inside.map(([px, py]) => [px, (tops.get(px) ?? 0) + py]);
      const lower = inside.map(([px]) => [px, tops.get(px) ?? 0]).reverse();
      if (upper.length) parts.push(`<path class="area c${colour}" d="M${path([...upper, ...lower])}Z"/>`);
      tops = new Map([...tops, ...upper]);
      continue;
    }
    if (points.length) parts.push(`<path class="line c${colour}${soft ? " faint" : ""}" d="M${path(points)}"/>`);
    if (soft?.length) parts.push(`<path class="line c${colour}" d="M${path(soft)}"/>`);
    if (dots || inside.length === 1) {
      for (const [px, py] of inside) parts.push(`<circle class="dot c${colour}" cx="${x(px).toFixed(1)}" cy="${y(py).toFixed(1)}" r="3"/>`);
    }
  }
  const marks = shared ? JSON.parse(shared.dataset.marks) : {};
  for (const [kind, steps] of Object.entries(marks)) {
    const places = near(steps.map((step) => place(step)).filter((at) => at >= low && at <= high).map(x), 3);
    const edges = kind === "saved" ? `${height - below}v-4` : places.length < 12 ? `${above}V${height - below}` : `${above}v7`;
    const path = places.map((at) => `M${at.toFixed(1)} ${edges}`).join("");
    if (places.length) parts.push(`<path class="${kind}" d="${path}"><title>${meanings[kind]}</title></path>`);
  }
  // A nested svg cuts off what lies outside of its box: curves that leave the range.
  const size = `width="${width - left - right + 8}" height="${height}"`;
  plot.querySelector(".drawn").innerHTML = `${axis.join("")}<svg x="${left - 4}" y="0" ${size}
    viewBox="${left - 4} 0 ${width - left - right + 8} ${height}">${parts.join("")}</svg>`;
}

const layouts = new WeakMap();
function current(plot) {
  if (!layouts.has(plot)) layouts.set(plot, layout(plot));
  return layouts.get(plot);
}

function interactive(plot) {
  const cursor = plot.querySelector(".cursor"), card = plot.closest(".card");
  let tip = null, at = null, start = null;
  const hide = () => { tip?.remove(); tip = null; cursor.setAttribute("d", ""); };
  const stops = () => {
    const { drawn, low, high } = current(plot);
    const found = new Map(drawn.flatMap(({ points, lost }) => [...points, ...lost]).filter(([x]) => x >= low && x <= high).map(([x, , step]) => [x, step]));
    return [...found].sort((a, b) => a[0] - b[0]);
  };
  const show = (stop) => {
    if (!stop) return;
    const { drawn, box: [left, , above, below, width, height], x } = current(plot);
    const [where, step] = stop;
    cursor.setAttribute("d", `M${x(where)} ${above}V${height - below}`);
    tip ??= card.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
    tip.replaceChildren(view.axis === "hours" ? `${number(where)} h, step ${number(step)}` : `step ${number(step)}`);
    for (const { label, colour, points, lost } of drawn) {
      const missing = lost.find(([px]) => px === where);
      const point = missing ?? points.reduce((best, one) => Math.abs(one[0] - where) < Math.abs(best[0] - where) ? one : best, points[0]);
      if (!point) continue;
      const line = document.createElement("div");
      line.append(Object.assign(document.createElement("i"), { className: `c${colour}` }));
      line.append(`${label} ${missing ? missing[1] : number(point[1])}` + (point[0] === where ? "" : ` (step ${number(point[2])})`));
      tip.append(line);
    }
    const size = plot.getBoundingClientRect(), around = card.getBoundingClientRect();
    const px = size.left - around.left + x(where) / width * size.width;
    const flip = px + tip.offsetWidth + 12 > around.width;
    tip.style.left = `${flip ? Math.max(0, px - tip.offsetWidth - 12) : px + 12}px`;
    tip.style.top = `${size.top - around.top + 8}px`;
  };
  const under = (event) => {
    const { box: [left, right, , , width], low, high } = current(plot), size = plot.getBoundingClientRect();
    const inside = ((event.clientX - size.left) / size.width * width - left) / (width - left - right);
    return low + Math.min(1, Math.max(0, inside)) * (high - low);
  };
  const nearest = (where) => stops().reduce((best, one) => !best || Math.abs(one[0] - where) < Math.abs(best[0] - where) ? one : best, null);
  plot.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") start = [under(event), event.clientX]; });
  plot.addEventListener("pointermove", (event) => {
    at = nearest(under(event));
    show(at);
    if (start && Math.abs(event.clientX - start[1]) > 8) plot.classList.add("zooming");
  });
  plot.addEventListener("pointerup", (event) => {
    const from = start, isDrag = from && Math.abs(event.clientX - from[1]) > 8;
    start = null;
    plot.classList.remove("zooming");
    if (isDrag) zoom(...[from[0], under(event)].sort((a, b) => a - b));
  });
  plot.addEventListener("dblclick", () => zoom(null, null));
  plot.addEventListener("pointerleave", () => { start = null; hide(); });
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const all = stops(), index = at ? all.findIndex(([x]) => x === at[0]) : all.length - 1;
    at = all[Math.min(all.length - 1, Math.max(0, (index < 0 ? all.length - 1 : index) + by))];
    show(at);
  });
}

const tools = document.getElementById("view");
const field = (name) => tools?.querySelector(`[name=${name}]`);

// Plots of a closed group are drawn when it opens.
function redraw() {
  for (const plot of plots) {
    layouts.delete(plot);
    plot.dataset.stale = "1";
    if (!plot.closest("details:not([open])")) refresh(plot);
  }
}

function refresh(plot) {
  if (!plot.dataset.stale) return;
  delete plot.dataset.stale;
  draw(plot);
}

function zoom(from, to) {
  const whole = view.axis === "steps";
  view.from = from === null ? null : whole ? Math.floor(from) : from;
  view.to = to === null ? null : whole ? Math.ceil(to) : to;
  showView();
  redraw();
  remember();
}

function showView() {
  field("axis").value = view.axis;
  field("log").checked = view.log;
  const text = (value) => (value === null ? "" : view.axis === "steps" ? String(value) : value.toFixed(3));
  field("from").value = text(view.from);
  field("to").value = text(view.to);
}

function rememberPlots(now) {
  if (view.axis !== "steps") now.set("axis", view.axis);
  if (view.log) now.set("log", "1");
  if (view.from !== null) now.set("from", view.from);
  if (view.to !== null) now.set("to", view.to);
}

if (tools) {
  const limit = (text) => (text === "" || text === null || !Number.isFinite(Number(text)) ? null : Number(text));
  tools.addEventListener("change", (event) => {
    if (event.target.name === "axis") view.from = view.to = null;
    else [view.from, view.to] = [limit(field("from").value), limit(field("to").value)];
    if (view.from !== null && view.to !== null && view.to <= view.from) view.to = null;
    [view.axis, view.log] = [field("axis").value, field("log").checked];
    zoom(view.from, view.to);
  });
  tools.querySelector("button").addEventListener("click", () => zoom(null, null));
  const isHours = wanted.get("axis") === "hours" && hours.some((known) => known.length);
  Object.assign(view, { axis: isHours ? "hours" : "steps", log: wanted.has("log"), from: limit(wanted.get("from")), to: limit(wanted.get("to")) });
  tools.hidden = false;
  showView();
}
plots.forEach(interactive);
redraw();
for (const log of $all("pre.log")) log.scrollTop = log.scrollHeight;
for (const group of $all("details.group")) {
  group.addEventListener("toggle", () => $all("svg.plot", group).forEach(refresh));
}
