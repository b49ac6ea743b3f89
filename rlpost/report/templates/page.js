"use strict";
// Filters and tooltips of the report. The page is whole without it. What a filter is set to stands in the address
// (#answers=text&settings=text&all=1), so that a view can be passed on.

const $all = (selector, within = document) => [...within.querySelectorAll(selector)];
const wanted = new URLSearchParams(location.hash.slice(1));

function filter(tools) {
  const rows = $all("[data-row]", document.getElementById(tools.dataset.filters));
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const search = tools.querySelector("input[type=search]");
  const choice = tools.querySelector("select");
  const all = tools.querySelector("input[type=checkbox]");
  const count = tools.querySelector("output");
  const more = document.createElement("button");
  let atMost = Number(tools.dataset.atMost) || Infinity;
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, n) => {
      const found = words.every((word) => texts[n].includes(word))
        && (!choice || !choice.value || row.dataset.kind === choice.value)
        && (!all || all.checked || words.length > 0 || "differs" in row.dataset);
      shown += found;
      row.hidden = !found || shown > atMost;
    });
    count.value = `${shown} of ${rows.length}`;
    more.hidden = shown <= atMost;
    more.textContent = `show all ${shown}`;
  };
  search.value = wanted.get(tools.dataset.filters) ?? "";
  if (choice) choice.value = wanted.get("reward") ?? "";
  if (all) all.checked = wanted.has("all");
  tools.addEventListener("input", () => { apply(); remember(); });
  more.addEventListener("click", () => { atMost = Infinity; apply(); });
  document.getElementById(tools.dataset.filters).after(more);
  apply();
}

function remember() {
  const now = new URLSearchParams();
  for (const tools of $all("[data-filters]")) {
    const [search, choice, all] = ["input[type=search]", "select", "input[type=checkbox]"].map((one) => tools.querySelector(one));
    if (search.value) now.set(tools.dataset.filters, search.value);
    if (choice && choice.value) now.set("reward", choice.value);
    if (all && all.checked) now.set("all", "1");
  }
  try { history.replaceState(null, "", "#" + now); } catch { /* a sandboxed page keeps no address */ }
}

const number = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });

function tooltip(plot) {
  const { box: [left, right, top, bottom, width, height], x: [low, high], curves } = JSON.parse(plot.dataset.plot);
  const cursor = plot.querySelector(".cursor");
  const card = plot.closest(".card");
  const steps = [...new Set(curves.flatMap((curve) => curve.points.map(([x]) => x)))].sort((a, b) => a - b);
  let tip = null;
  const hide = () => { tip?.remove(); tip = null; cursor.setAttribute("d", ""); };
  const show = (step) => {
    const at = left + (step - low) / ((high - low) || 1) * (width - left - right);
    cursor.setAttribute("d", `M${at} ${top}V${height - bottom}`);
    tip ??= card.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));
    tip.replaceChildren(`step ${number(step)}`);
    for (const { label, colour, points } of curves) {
      const point = points.reduce((best, one) => Math.abs(one[0] - step) < Math.abs(best[0] - step) ? one : best, points[0]);
      if (!point) continue;
      const line = document.createElement("div");
      line.append(Object.assign(document.createElement("i"), { className: `c${colour}` }));
      line.append(`${label} ${number(point[1])}` + (point[0] === step ? "" : ` (step ${number(point[0])})`));
      tip.append(line);
    }
    const place = plot.getBoundingClientRect(), around = card.getBoundingClientRect();
    const x = place.left - around.left + at / width * place.width;
    const flip = x + tip.offsetWidth + 12 > around.width;
    tip.style.left = `${flip ? Math.max(0, x - tip.offsetWidth - 12) : x + 12}px`;
    tip.style.top = `${place.top - around.top + 8}px`;
  };
  const nearest = (step) => steps.reduce((best, one) => Math.abs(one - step) < Math.abs(best - step) ? one : best, steps[0]);
  let now = steps.length - 1;
  plot.addEventListener("pointermove", (event) => {
    const place = plot.getBoundingClientRect();
    const at = (event.clientX - place.left) / place.width * width;
    const step = nearest(low + (at - left) / (width - left - right) * (high - low));
    now = steps.indexOf(step);
    show(step);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    now = Math.min(steps.length - 1, Math.max(0, now + by));
    show(steps[now]);
  });
}

$all("[data-filters]").forEach(filter);
$all("svg.plot").forEach(tooltip);
