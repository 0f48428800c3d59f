// The page "Will it fit?": looks up what tools/make_fit_page.py wrote to fit_data.js.
(function () {
  "use strict";
  const data = window.FIT;
  const element = (id) => document.getElementById(id);
  const gb = (bytes) => (bytes / 1e9).toFixed(2) + " GB";

  function fill(select, values) {
    const before = select.value;
    select.replaceChildren(...values.map(([value, text]) => new Option(text, value)));
    if (values.some(([value]) => value === before)) select.value = before;
  }

  function entry() {
    const shape = element("fit-shape").value;
    return data.entries.find((each) => each.model === element("fit-model").value && key(each) === shape);
  }

  function key(each) {
    return each.batch + "x" + (each.length ?? "images");
  }

  function shape(each) {
    return each.length === null ? `${each.batch} images` : `${each.batch} x ${each.length}`;
  }

  // Points of a mode, the fastest first, with what a card would have to reserve for each.
  function points(each, mode) {
    const rows = each.modes[mode].map(([peak, slowdown, what, exact]) => ({ peak, slowdown, what, exact }));
    for (const row of rows) row.reserved = row.what === "nothing" ? each.reserved_bytes : row.peak * each.reserved_over_live;
    // A model that fits as it is is left alone, whatever else would be as fast.
    const isPlain = (row) => Number(row.what === "nothing");
    return rows.sort((a, b) => isPlain(b) - isPlain(a) || a.slowdown - b.slowdown || a.peak - b.peak);
  }

  function show() {
    const each = entry();
    const card = data.cards.find((one) => one.name === element("fit-card").value);
    const mode = element("fit-mode").value;
    const rows = points(each, mode);
    const chosen = rows.find((row) => row.reserved <= card.budget_bytes);
    element("fit-answer").textContent = answer(each, card, chosen, rows);
    element("fit-table").tBodies[0].replaceChildren(...rows.map((row) => line(row, row === chosen)));
    const length = each.length === null ? "" : ` --seq ${each.length}`;
    element("fit-command").textContent =
      `memscale estimate ${each.model} --batch ${each.batch}${length} --gpu "${card.name}"`;
  }

  function answer(each, card, chosen, rows) {
    const where = `${card.name} has a budget of ${gb(card.budget_bytes)}; the plain step reserves ${gb(each.reserved_bytes)}.`;
    if (!chosen) {
      const least = Math.min(...rows.map((row) => row.reserved));
      return `Does not fit in this mode: at least about ${gb(least)} would be reserved. ${where}`;
    }
    if (chosen.what === "nothing") return `Fits as it is. ${where}`;
    const exact = chosen.exact ? "" : ", not exact";
    return `Fits, predicted at ${chosen.slowdown.toFixed(2)}x the time${exact}: ${chosen.what}. ${where}`;
  }

  function line(row, isChosen) {
    const cells = [gb(row.peak), gb(row.reserved), row.slowdown.toFixed(2) + "x", row.what + (row.exact ? "" : " (not exact)")];
    const line = document.createElement("tr");
    if (isChosen) line.className = "chosen";
    for (const text of cells) {
      const cell = line.insertCell();
      const inner = document.createElement(isChosen ? "strong" : "span");
      inner.textContent = text;
      cell.append(inner);
    }
    return line;
  }

  function shapes() {
    const own = data.entries.filter((each) => each.model === element("fit-model").value);
    fill(element("fit-shape"), own.map((each) => [key(each), shape(each)]));
  }

  const models = [...new Map(data.entries.map((each) => [each.model, each])).values()];
  fill(element("fit-model"), models.map((each) => [each.model, `${each.model} (${Math.round(each.parameters / 1e6)} M)`]));
  fill(element("fit-card"), data.cards.map((card) => [card.name, `${card.name} (${Math.round(card.total_bytes / 2 ** 30)} GiB)`]));
  fill(element("fit-mode"), Object.keys(data.entries[0].modes).map((mode) => [mode, mode]));
  element("fit-mode").value = "balanced";
  element("fit-card").value = "RTX 3070";
  // Begin with what that card does not hold as it is: there is something to see.
  const budget = data.cards.find((card) => card.name === "RTX 3070").budget_bytes;
  const first = data.entries.find((each) => each.reserved_bytes > budget) ?? data.entries[0];
  element("fit-model").value = first.model;
  shapes();
  element("fit-shape").value = key(first);
  element("fit-model").addEventListener("change", shapes);
  element("fit-form").addEventListener("change", show);
  show();
})();
