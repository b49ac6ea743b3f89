"use strict";
// Filters of the report; plots.js follows in the same script. Without it the page lacks its plots alone. What a filter and the
// plots are set to stands in the address (#answers=text&settings=text&all=1&axis=hours&log=1), so that a view can
// be passed on.

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
  rememberPlots(now);
  try { history.replaceState(null, "", "#" + now); } catch { /* a sandboxed page keeps no address */ }
}

$all("[data-filters]").forEach(filter);
