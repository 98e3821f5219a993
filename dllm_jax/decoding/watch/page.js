"use strict";
// Text of the data reaches the page through textContent alone, never as HTML.
const LEFT_OUT = -2; // in the place of an age: neither computed nor attended to
const panels = JSON.parse(document.getElementById("data").textContent).panels.map(prepared);
const byId = (id) => document.getElementById(id);
const last = Math.max(...panels.map((panel) => panel.steps.length));
const oldest = Math.max(1, ...panels.flatMap((panel) => panel.ages.map((row) => Math.max(...row))));
// The address may name a view: answer.html#step=3&color=confidence&candidates=1
const asked = new URLSearchParams(location.hash.slice(1));
const view = {
  step: Math.min(last, Math.max(0, Math.trunc(Number(asked.get("step") ?? last)) || 0)),
  color: asked.get("color") === "confidence" ? "confidence" : "step",
  candidates: asked.has("candidates"),
  timer: null,
};

function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// -- data ---------------------------------------------------------------------------------------------------

// The positions of a set that is given as its runs of neighbors.
function inRuns(runs, length) {
  const inside = new Array(length).fill(false);
  for (let run = 0; run < runs.length; run += 2) inside.fill(true, runs[run], runs[run + 1]);
  return inside;
}

// The token, step and confidence of every position after every step, and the age of what was stored of it.
function prepared(panel) {
  const length = panel.tokens.length;
  let state = panel.tokens.map((token) => ({ token, step: 0, confidence: null }));
  const lastComputed = new Array(length).fill(-1);
  panel.states = [state];
  panel.ages = [];
  panel.steps.forEach((step, i) => {
    state = state.slice();
    for (const [position, token, confidence, of = i + 1] of step.wrote) state[position] = { token, step: of, confidence };
    panel.states.push(state);
    const [computed, read] = [step.computed, step.read].map((runs) => inRuns(runs, length));
    computed.forEach((now, at) => now && (lastComputed[at] = i));
    panel.ages.push(lastComputed.map((at, x) => (!computed[x] && !read[x] ? LEFT_OUT : at < 0 ? -1 : i - at)));
  });
  // Where layers differ, some compute every position, though few were selected.
  panel.widens = panel.steps.some(({ widened }) => widened.length && (widened[0] > 0 || widened[1] < panel.layers));
  // Masks at first, and what an answer does not have yet.
  panel.toFill = panel.tokens.flatMap((token, i) => (token === panel.mask || token === -3 ? [i] : []));
  return panel;
}

// What a step, counted from 1, reads of every position in one layer: age as above.
function layerAges(panel, layer, step) {
  let since = -1; // the last step that ran this layer over everything
  for (let i = 0; i < step; i += 1) {
    const runs = panel.steps[i].widened;
    for (let run = 0; run < runs.length; run += 2) if (layer >= runs[run] && layer < runs[run + 1]) since = i;
  }
  const age = since < 0 ? Infinity : step - 1 - since;
  const stored = (own) => (own < 0 ? (since < 0 ? -1 : age) : Math.min(own, age));
  return panel.ages[step - 1].map((own) => (own === LEFT_OUT && age > 0 ? LEFT_OUT : stored(own)));
}

const pieceOf = (panel, token) => panel.pieces[token] ?? [`[${token}]`, false];

// Line breaks are shown, and still break the line.
const visible = ([text, special]) => (special ? text : text.replaceAll("\n", "⏎\n").replaceAll("\t", "→\t"));

const inWords = (panel, token) => `“${pieceOf(panel, token)[0].replaceAll("\n", "⏎")}”`;

function percent(confidence) {
  return confidence === null ? "" : `, confidence ${confidence.toFixed(3)}`;
}

// -- the answer ---------------------------------------------------------------------------------------------

function tint(panel, cell) {
  let share = last > 1 ? (cell.step - 1) / (last - 1) : 0;
  if (view.color === "confidence") {
    if (cell.confidence === null) return "";
    const sure = panel.entropies ? Math.exp(cell.confidence) : cell.confidence;
    share = 1 - Math.min(1, Math.max(0, sure));
  }
  const mixed = `color-mix(in oklab, var(--cold), var(--warm) ${(100 * share).toFixed(1)}%)`;
  return `color-mix(in srgb, ${mixed} 42%, transparent)`;
}

function drawToken(panel, position, node) {
  const at = Math.min(view.step, panel.steps.length);
  const cell = panel.states[at][position];
  const masked = cell.token === panel.mask;
  const final = panel.states[panel.steps.length][position].token;
  let shown = masked ? final : cell.token;
  let style = masked ? "token mask" : "token";
  let note = masked ? "masked" : cell.step ? `step ${cell.step}${percent(cell.confidence)}` : "given";
  // What the next step proposes for a mask is its candidate; the step may keep it a mask all the same.
  if (masked && at < panel.steps.length) {
    const next = panel.steps[at];
    const there = next.source ? next.source.indexOf(position) : position; // where the step moves it
    const candidate = [...next.wrote, ...next.proposed].find(([where, , , of]) => where === there && of === undefined);
    if (candidate) note += `; candidate ${inWords(panel, candidate[1])}${percent(candidate[2])}`;
    if (candidate && view.candidates) [shown, style] = [candidate[1], "token candidate"];
  }
  const piece = pieceOf(panel, shown);
  if (piece[1]) style += " special";
  if (!masked && at > 0 && cell.step === at && at === view.step) style += " new";
  node.className = style;
  node.textContent = visible(piece);
  node.style.background = masked || !cell.step ? "" : tint(panel, cell);
  node.dataset.note = `position ${position}: ${masked ? "" : `${inWords(panel, cell.token)}, `}${note}`;
}

// -- the map ------------------------------------------------------------------------------------------------

const colors = () => {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => {
    const hex = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  };
  return Object.fromEntries(["now", "fresh", "stale", "never", "out", "dot", "given"].map((n) => [n, read(`--${n}`)]));
};

const rgb = (parts) => `rgb(${parts.map(Math.round).join(" ")})`;

// Steps that long ago are many: their logarithm keeps the first ones apart.
function ageColor(age, palette) {
  if (age < 0) return age === LEFT_OUT ? palette.out : palette.never;
  if (age === 0) return palette.now;
  const share = oldest > 1 ? Math.log(age) / Math.log(oldest) : 0;
  return palette.fresh.map((low, i) => low + share * (palette.stale[i] - low));
}

// Sizes a map of so many cells: the pixels of a cell across and down, and what draws.
function sized(canvas, columns, rows, rowHeight) {
  const across = Math.max(2, Math.min(16, Math.floor(1600 / columns)));
  const down = Math.max(2, Math.min(14, Math.floor(rowHeight)));
  canvas.width = across * columns;
  canvas.height = down * rows;
  canvas.style.height = `${canvas.height}px`;
  canvas.parentElement.style.maxWidth = `${24 * columns}px`;
  return [across, down, canvas.getContext("2d")];
}

// Column and row of the cell that is pointed at.
function cellAt(canvas, event, columns, rows) {
  const box = canvas.getBoundingClientRect();
  const share = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  return [Math.floor(share[0] * columns), Math.floor(share[1] * rows)];
}

function drawMap(panel) {
  const palette = colors();
  const steps = panel.steps.length;
  const [across, down, draw] = sized(panel.canvas, panel.tokens.length, steps + 1, 360 / Math.max(steps, 1));
  panel.rowHeight = down;
  const cell = (x, y, color, inset = 0) => {
    draw.fillStyle = rgb(color);
    draw.fillRect(x * across + inset, y * down + inset, across - 2 * inset, down - 2 * inset);
  };
  // The first line tells what was given from what was to be filled; each line below is a step.
  panel.tokens.forEach((token, x) => cell(x, 0, token === panel.mask ? palette.never : palette.given));
  panel.ages.forEach((row, y) => row.forEach((age, x) => cell(x, y + 1, ageColor(age, palette))));
  const inset = Math.min(across, down) >= 6 ? Math.floor(Math.min(across, down) / 4) : 0;
  panel.steps.forEach((step, y) =>
    step.wrote.forEach(([x, token]) => token !== panel.mask && cell(x, y + 1, palette.dot, inset)),
  );
}

// The step, from 1, whose layers are shown.
const layersAt = (panel) => Math.max(1, Math.min(view.step, panel.steps.length));

// The layers at one step, of policies whose layers may compute different positions.
function drawLayers(panel) {
  const step = layersAt(panel);
  const palette = colors();
  const [across, down, draw] = sized(panel.layerCanvas, panel.tokens.length, panel.layers, Math.max(3, 240 / panel.layers));
  for (let layer = 0; layer < panel.layers; layer += 1)
    layerAges(panel, layer, step).forEach((age, x) => {
      draw.fillStyle = rgb(ageColor(age, palette));
      draw.fillRect(x * across, layer * down, across, down);
    });
  panel.layerTitle.textContent = `Layers at step ${step} (across: positions, down: layers)`;
}

function layerNote(panel, event) {
  const [position, layer] = cellAt(panel.layerCanvas, event, panel.tokens.length, panel.layers);
  if (!(position in panel.tokens) || layer < 0 || layer >= panel.layers) return null;
  return `layer ${layer}, position ${position}: ${ageInWords(layerAges(panel, layer, layersAt(panel))[position])}`;
}

function ageInWords(age) {
  if (age === 0) return "computed";
  if (age === LEFT_OUT) return "neither computed nor attended to";
  return age < 0 ? "not computed yet" : `cached ${age} step${age > 1 ? "s" : ""} ago`;
}

function mapNote(panel, event) {
  const [position, step] = cellAt(panel.canvas, event, panel.tokens.length, panel.steps.length + 1);
  if (!(position in panel.tokens) || step < 0 || step > panel.steps.length) return null;
  const given = panel.tokens[position] === panel.mask ? "to be filled" : inWords(panel, panel.tokens[position]);
  if (step === 0) return { step, text: `position ${position}: ${given}` };
  const age = panel.ages[step - 1][position];
  const token = panel.states[step][position];
  const what = token.token === panel.mask ? "masked" : inWords(panel, token.token);
  const decoded = token.step === step && token.token !== panel.mask ? ", unmasked now" : "";
  return { step, text: `step ${step}, position ${position}: ${what}${decoded}\n${ageInWords(age)}` };
}

// -- the page -----------------------------------------------------------------------------------------------

function statistics(panel) {
  const s = panel.stats;
  const parts = [`${s.nfe} forward passes`, `${s.computed_tokens} computed tokens`];
  if (s.widened_tokens > 0) parts.push(`${s.widened_tokens.toFixed(1)} more in layers that recompute all tokens`);
  if (s.cache_ratio !== null) parts.push(`${(100 * s.cache_ratio).toFixed(1)}% of tokens reused`);
  parts.push(`${s.refreshes} full step${s.refreshes === 1 ? "" : "s"}`, `${s.answer_tokens} answer tokens`);
  if (!s.finite) parts.push("ended by NaN or infinite logits");
  return parts.join(" · ");
}

// Padding is a run of one token at the left: it is told by its number.
function promptText(panel, box) {
  const given = panel.tokens.slice(0, panel.toFill[0] ?? panel.tokens.length);
  let run = 1;
  while (run < given.length && given[run] === given[0]) run += 1;
  if (run > 2) box.append(element("span", "special", `${pieceOf(panel, given[0])[0]} × ${run} `));
  given.slice(run > 2 ? run : 0).forEach((token) => {
    const piece = pieceOf(panel, token);
    box.append(element("span", piece[1] ? "special" : "", visible(piece)));
  });
}

function build(panel) {
  const section = element("section");
  section.append(element("h2", "", panel.name), element("div", "stats", statistics(panel)));
  const first = panel.toFill[0] ?? 0;
  if (first > 0) {
    const prompt = element("details");
    const text = element("div", panel.named ? "text" : "text ids");
    promptText(panel, text);
    prompt.append(element("summary", "", `Prompt, ${first} tokens`), text);
    section.append(prompt);
  }
  // Behind the first mask everything is shown: of a template, the given tokens between masks too.
  const answer = element("div", panel.named ? "text" : "text ids");
  panel.nodes = panel.tokens.slice(first).map((_, i) => {
    const node = element("span", "token");
    answer.append(node);
    return [first + i, node];
  });
  section.append(answer, element("h3", "", `Computed tokens and age of the cache (across: positions, down: steps 1 to ${panel.steps.length})`));
  const map = element("div", "map");
  panel.canvas = element("canvas");
  panel.canvas.setAttribute("role", "img");
  panel.canvas.setAttribute("aria-label", "Map of positions and steps: computed, or cached how many steps ago");
  panel.cursor = element("div", "cursor");
  map.append(panel.canvas, panel.cursor);
  map.addEventListener("mousemove", (event) => tip(event, mapNote(panel, event)?.text));
  map.addEventListener("mouseleave", () => tip(null));
  map.addEventListener("click", (event) => {
    const found = mapNote(panel, event);
    if (found) go(found.step);
  });
  const legend = element("div", "legend");
  const has = (test) => panel.ages.some((row) => row.some(test));
  const entries = [
    ["now", "computed in this step", true],
    ["ages", oldest > 1 ? `cached 1 to ${oldest} steps ago` : "cached 1 step ago", has((age) => age > 0)],
    ["never", "not computed yet", has((age) => age === -1)],
    ["decoded", "unmasked in this step", true],
    ["out", "neither computed nor attended to", has((age) => age === LEFT_OUT)],
  ];
  for (const [name, text] of entries.filter(([, , occurs]) => occurs)) {
    const entry = element("span");
    entry.append(element("i", name), text);
    legend.append(entry);
  }
  section.append(map, legend);
  if (panel.widens) {
    panel.layerTitle = element("h3");
    panel.layerCanvas = element("canvas");
    panel.layerCanvas.setAttribute("role", "img");
    panel.layerCanvas.setAttribute("aria-label", "Map of positions and layers: computed, or cached how many steps ago");
    const layers = element("div", "map layers");
    layers.append(panel.layerCanvas);
    layers.addEventListener("mousemove", (event) => tip(event, layerNote(panel, event)));
    layers.addEventListener("mouseleave", () => tip(null));
    section.append(panel.layerTitle, layers);
  }
  byId("panels").append(section);
}

function render() {
  byId("step").value = view.step;
  byId("where").textContent = view.step ? `step ${view.step} of ${last}` : "before step 1";
  const byStep = view.color === "step";
  byId("low").textContent = byStep ? "step 1" : "confidence 1";
  byId("high").textContent = byStep ? `${last}` : "0";
  for (const panel of panels) {
    panel.nodes.forEach(([position, node]) => drawToken(panel, position, node));
    if (panel.widens) drawLayers(panel);
    const at = Math.min(view.step, panel.steps.length);
    panel.cursor.style.top = `${at * panel.rowHeight - 2}px`;
    panel.cursor.style.height = `${panel.rowHeight + 4}px`;
  }
}

function go(step) {
  view.step = Math.min(last, Math.max(0, step));
  render();
}

function pause() {
  clearInterval(view.timer);
  view.timer = null;
  byId("play").textContent = "▶ Play";
}

function play() {
  if (view.step >= last) go(0);
  byId("play").textContent = "❚❚ Pause";
  view.timer = setInterval(() => (view.step >= last ? pause() : go(view.step + 1)), Math.max(40, Math.min(400, 8000 / last)));
}

function tip(event, text) {
  const box = byId("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  box.style.left = `${Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8)}px`;
  box.style.top = `${Math.min(event.clientY + 16, innerHeight - box.offsetHeight - 8)}px`;
}

panels.forEach(build);
panels.forEach(drawMap);
byId("step").max = last;
byId("candidates").checked = view.candidates;
document.querySelector(`input[value=${view.color}]`).checked = true;
byId("step").addEventListener("input", (event) => (pause(), go(Number(event.target.value))));
byId("play").addEventListener("click", () => (view.timer === null ? play() : pause()));
byId("candidates").addEventListener("change", (event) => ((view.candidates = event.target.checked), render()));
document.querySelectorAll("input[name=color]").forEach((radio) =>
  radio.addEventListener("change", () => ((view.color = radio.value), render())),
);
byId("panels").addEventListener("mouseover", (event) => tip(event, event.target.dataset.note));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  panels.forEach(drawMap);
  render();
});
render();
