// Draws what a model attends to over the frames of a clip, from the data beside this script.
"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const bytes = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
const shorts = text => new Uint16Array(bytes(text).buffer);
const [GT, GH, GW] = data.grid, PLANE = GH * GW, N = data.num_tiles;
const queryTiles = shorts(data.query_tiles), tiles = shorts(data.tiles), coarseRows = bytes(data.coarse), massRows = bytes(data.mass);
const recalls = shorts(data.recall);
const counts = shorts(data.counts);
const maps = Object.fromEntries(Object.entries(data.maps).map(([name, map]) => [name, {...map, values: bytes(map.values)}]));
const shown = data.shown, NL = shown.layers.length, NH = shown.heads.length, NQ = shown.queries.length;
const percent = x => x == null ? "–" : (100 * x).toFixed(x < .0995 ? 1 : 0) + "%";
const number = x => x == null ? "–" : Number.isInteger(x) ? String(x) : Math.abs(x) >= 100 ? x.toFixed(0) : Math.abs(x) >= 10 ? x.toFixed(1) : x.toFixed(2);
// how probabilities are stored: 7 or 8 bits over five powers of ten
const opened = (bits, top) => bits ? 10 ** (5 * (bits / top - 1)) : 0;

// place and extent of the tiles of a map
function boxes(map, count) {
  const all = Array.from({length: count}, () => ({size: 0, centre: [0, 0, 0], low: [1e9, 1e9, 1e9], high: [-1, -1, -1]}));
  map.forEach((tile, i) => {
    const box = all[tile];
    box.size += 1;
    [Math.floor(i / PLANE), Math.floor(i % PLANE / GW), i % GW].forEach((x, d) => {
      box.centre[d] += x; box.low[d] = Math.min(box.low[d], x); box.high[d] = Math.max(box.high[d], x);
    });
  });
  all.forEach(box => { box.centre = box.centre.map(x => x / box.size) });
  return all;
}
const queryBoxes = boxes(queryTiles, data.num_queries), kvBoxes = boxes(tiles, N);

const views = {selected: "selected tiles", attention: "true attention, selected and missed",
  popularity: "popularity of kv tiles"};
if (!data.ranked) views.selected = "attended tiles";
Object.entries(maps).forEach(([name, map]) => { views[name] = map.label });

const state = {timestep: 0, layer: shown.layers[NL >> 1], head: "all", query: shown.queries[NQ >> 1], frame: 0,
  view: "selected", metric: "recall", borders: 0, asked: -1};

// the middle one of the frames that hold tokens of the query tile
function ownFrame() {
  const holds = time => queryTiles.slice(time * GH * GW, (time + 1) * GH * GW).includes(state.query);
  const own = [...data.times.keys()].filter(frame => holds(data.times[frame]));
  return own.length ? own[own.length >> 1] : data.frames.length >> 1;
}

function readHash() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const whole = (name, allowed) => {
    const value = Number(asked.get(name));
    if (asked.has(name) && allowed.includes(value)) state[name] = value;
  };
  whole("layer", shown.layers);
  if (asked.get("head") === "all") state.head = "all"; else whole("head", shown.heads);
  if (asked.has("query")) { setQuery(Number(asked.get("query"))); state.frame = ownFrame() }
  const timestep = data.timesteps.indexOf(Number(asked.get("timestep")));
  if (asked.has("timestep") && timestep >= 0) state.timestep = timestep;
  const frame = data.frame_numbers.indexOf(Number(asked.get("frame")));
  if (asked.has("frame") && frame >= 0) state.frame = frame;
  if (asked.get("view") in views) state.view = asked.get("view");
  if (asked.get("metric") in data.metrics) state.metric = asked.get("metric");
  if (asked.has("borders")) state.borders = asked.get("borders") === "1" ? 1 : 0;
}

let writing = 0;
function writeHash() {
  const {timestep, frame, asked: _, ...rest} = state;
  const asked = new URLSearchParams({...rest, timestep: data.timesteps[timestep], frame: data.frame_numbers[frame]});
  // browsers allow few changes of the address in a time
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", "#" + asked), 250);
}

// the nearest query tile that is in the page
function setQuery(tile) {
  if (!(tile >= 0 && tile < data.num_queries)) return;
  state.asked = Math.floor(tile);
  const here = queryBoxes[state.asked].centre;
  const away = other => queryBoxes[other].centre.reduce((sum, x, d) => sum + ((x - here[d]) / data.grid[d]) ** 2, 0);
  state.query = shown.queries.reduce((best, other) => away(other) < away(best) ? other : best, shown.queries[0]);
}

const someHeads = () => state.head === "all" ? shown.heads.map((_, i) => i) : [shown.heads.indexOf(state.head)];
const layerPlace = () => shown.layers.indexOf(state.layer);

// share of heads that select each kv tile, mean coarse probability and mean true attention of the query tile
function row() {
  const heads = someHeads(), chosen = new Float32Array(N), coarse = new Float32Array(N), mass = new Float32Array(N);
  heads.forEach(head => {
    const at = (((state.timestep * NL + layerPlace()) * NH + head) * NQ + shown.queries.indexOf(state.query)) * N;
    for (let tile = 0; tile < N; tile++) {
      chosen[tile] += (coarseRows[at + tile] >> 7) / heads.length;
      coarse[tile] += opened(coarseRows[at + tile] & 127, 127) / heads.length;
      mass[tile] += opened(massRows[at + tile], 255) / heads.length;
    }
  });
  return {chosen, coarse, mass};
}

function popularityNow() {
  const lists = new Float32Array(N), heads = someHeads();
  heads.forEach(head => {
    const at = ((state.timestep * NL + layerPlace()) * NH + head) * N;
    for (let tile = 0; tile < N; tile++) lists[tile] += counts[at + tile] / heads.length;
  });
  return lists;
}

const style = getComputedStyle(document.documentElement);
const colours = Object.fromEntries(["query", "selected", "missed"].map(name => [name, style.getPropertyValue(`--${name}`).trim()]));
function tint(colour, opacity) {
  const [r, g, b] = [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},${opacity})`;
}
const ramp = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function heat(x) {
  const place = Math.min(Math.max(x, 0), 1) * (ramp.length - 1), i = Math.min(Math.floor(place), ramp.length - 2);
  return ramp[i].map((value, d) => Math.round(value + (ramp[i + 1][d] - value) * (place - i)));
}

// colour and opacity of every token, by the view
function paint() {
  if (state.view in maps) {
    const map = maps[state.view], at = (state.timestep * NL + layerPlace()) * (map.by === "tile" ? N : GT * PLANE);
    return token => {
      const [r, g, b] = heat(map.values[at + (map.by === "tile" ? tiles[token] : token)] / 255);
      return `rgba(${r},${g},${b},.72)`;
    };
  }
  if (state.view === "popularity") {
    const lists = popularityNow(), top = Math.max(...lists, 1e-9);
    return token => { const [r, g, b] = heat(lists[tiles[token]] / top); return `rgba(${r},${g},${b},.72)` };
  }
  const {chosen, coarse, mass} = row();
  if (state.view === "attention") {
    const top = Math.max(...mass, 1e-9);
    return token => {
      const tile = tiles[token], strength = .85 * Math.sqrt(mass[tile] / top);
      return chosen[tile] >= .5 ? tint(colours.selected, strength) : tint(colours.missed, strength);
    };
  }
  const top = Math.max(...coarse.map((p, tile) => p * chosen[tile]), 1e-9);
  return token => {
    const tile = tiles[token];
    if (!chosen[tile]) return null;
    return tint(colours.selected, Math.sqrt(chosen[tile]) * (data.ranked ? .35 + .45 * Math.sqrt(coarse[tile] / top) : .6));
  };
}

const pictures = [];
function draw(canvas, frame, colour) {
  const [H, W] = data.size, ratio = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round((canvas.clientWidth || 200) * ratio));
  canvas.width = width; canvas.height = Math.round(width * H / W);
  const pen = canvas.getContext("2d"), cw = canvas.width / GW, ch = canvas.height / GH, time = data.times[frame];
  pen.imageSmoothingEnabled = false;
  if (pictures[frame].naturalWidth) {
    pen.filter = "brightness(.75)"; pen.drawImage(pictures[frame], 0, 0, canvas.width, canvas.height); pen.filter = "none";
  }
  const edge = i => Math.round(i * cw), side = i => Math.round(i * ch);
  for (let y = 0; y < GH; y++) for (let x = 0; x < GW; x++) {
    const fill = colour((time * GH + y) * GW + x);
    if (fill === null) continue;
    pen.fillStyle = fill;
    pen.fillRect(edge(x), side(y), edge(x + 1) - edge(x), side(y + 1) - side(y));
  }
  const outline = (map, wanted, style, thick) => {
    const tileAt = (y, x) => y < 0 || x < 0 || y >= GH || x >= GW ? -1 : map[(time * GH + y) * GW + x];
    pen.strokeStyle = style; pen.lineWidth = thick; pen.beginPath();
    for (let y = 0; y < GH; y++) for (let x = 0; x < GW; x++) {
      const tile = tileAt(y, x);
      if (!wanted(tile)) continue;
      const [l, t, r, b] = [edge(x), side(y), edge(x + 1), side(y + 1)], in_ = thick / 2;
      if (tileAt(y - 1, x) !== tile) { pen.moveTo(l, t + in_); pen.lineTo(r, t + in_) }
      if (tileAt(y + 1, x) !== tile) { pen.moveTo(l, b - in_); pen.lineTo(r, b - in_) }
      if (tileAt(y, x - 1) !== tile) { pen.moveTo(l + in_, t); pen.lineTo(l + in_, b) }
      if (tileAt(y, x + 1) !== tile) { pen.moveTo(r - in_, t); pen.lineTo(r - in_, b) }
    }
    pen.stroke();
  };
  if (state.borders) outline(tiles, () => true, "rgba(255,255,255,.35)", ratio / 2);
  outline(queryTiles, tile => tile === state.query, colours.query, Math.max(2 * ratio, canvas.width / 150));
}

function tokenUnder(event, frame) {
  const box = event.currentTarget.getBoundingClientRect();
  const x = Math.min(GW - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * GW)));
  const y = Math.min(GH - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * GH)));
  return (data.times[frame] * GH + y) * GW + x;
}

const span = ({low, high}) => ["t", "h", "w"].map((axis, d) =>
  low[d] === high[d] ? `${axis} ${low[d]}` : `${axis} ${low[d]}–${high[d]}`).join(", ");
const headName = () => state.head === "all" ? (NH === data.num_heads ? "all heads" : `${NH} heads`) : `head ${state.head}`;

function tell() {
  const {chosen, coarse, mass} = row(), t = data.timesteps[state.timestep];
  const heads = someHeads(), kept = chosen.reduce((a, b) => a + b, 0);
  const recall = mean(heads.map(head => recalls[((state.timestep * NL + layerPlace()) * NH + head) * NQ
    + shown.queries.indexOf(state.query)] / 65535));
  $("what").textContent = `${views[state.view]}: layer ${state.layer}, ${headName()}, timestep ${t}`;
  $("told").textContent = `Query tile ${state.query} (${span(queryBoxes[state.query])}) selects ${number(Math.round(100 * kept) / 100)} of ${N} tiles `
    + `that hold ${percent(recall)} of its true attention (random tiles: ${percent(kept / N)}).`
    + (state.asked >= 0 && state.asked !== state.query ? ` Tile ${state.asked} is not in the page, this is the nearest that is.` : "");
  const swatch = (colour, text) => `<span><i style="background:${colour}"></i>${text}</span>`;
  let legend = "";
  if (state.view in maps) {
    const map = maps[state.view];
    legend = `<span>${number(map.low)}<b class="ramp"></b>${number(map.high)}</span>`;
  } else if (state.view === "popularity") {
    legend = `<span>0<b class="ramp"></b>${number(Math.max(...popularityNow()))} of ${data.num_queries} lists</span>`;
  } else if (state.view === "attention") {
    legend = swatch(colours.query, "query tile") + swatch(colours.selected, "attention on selected tiles")
      + swatch(colours.missed, "attention that is missed");
  } else {
    legend = swatch(colours.query, "query tile") + swatch(colours.selected, data.ranked ? "selected (stronger: higher coarse probability)" : "attended");
  }
  $("legend").innerHTML = legend;
  document.querySelectorAll(".ramp").forEach(bar => {
    bar.style.background = `linear-gradient(90deg, ${ramp.map(c => `rgb(${c})`).join(",")})`;
  });
  return {chosen, coarse, mass};
}

const mean = values => {
  const known = values.filter(x => x != null);
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
};
// of all heads that were measured, or of the chosen one
const cell = (name, timestep, layer) => {
  const heads = data.metrics[name].values[timestep][layer];
  return state.head === "all" ? mean(heads) : heads[state.head];
};
const beside = {recall: "recall_random", pair_overlap: "pair_random", four_overlap: "four_random"};
const isShare = name => !/gate|lists_(mean|median|p9|largest)/.test(name);
const show = (name, x) => isShare(name) ? percent(x) : number(x);

function drawHeat() {
  const name = state.metric, rows = data.layers.map((_, y) => data.timesteps.map((_, t) => cell(name, t, y)));
  const known = rows.flat().filter(x => x != null), top = isShare(name) ? 1 : Math.max(...known, 1e-9);
  $("heat-title").textContent = `By layer and timestep, ${state.head === "all" ? "mean of all heads" : "head " + state.head}`;
  const table = $("heat");
  table.textContent = "";
  const head = table.insertRow();
  const title = (row, text) => { const th = document.createElement("th"); th.textContent = text; row.append(th); return th };
  title(head, "layer");
  data.timesteps.forEach(t => title(head, `t ${t}`));
  if (beside[name]) title(head, "random");
  rows.forEach((values, y) => {
    const line = table.insertRow(), layer = data.layers[y], inPage = shown.layers.includes(layer);
    line.className = layer === state.layer ? "now" : "";
    title(line, String(layer));
    values.forEach((x, t) => {
      const td = line.insertCell(), [r, g, b] = heat(x == null ? 0 : x / top);
      td.textContent = show(name, x);
      if (x != null) {
        td.style.background = `rgb(${r},${g},${b})`;
        td.style.color = .3 * r + .59 * g + .11 * b > 120 ? "#111" : "#fff";
      }
      td.className = `cell${layer === state.layer && t === state.timestep ? " now" : ""}`;
      td.title = inPage ? "" : "not drawn in this page, see --layers";
      td.onclick = () => { state.timestep = t; if (inPage) state.layer = layer; refresh() };
    });
    if (beside[name]) line.insertCell().textContent = show(name, mean(data.timesteps.map((_, t) => cell(beside[name], t, y))));
  });
}

function drawHeads() {
  const y = data.layers.indexOf(state.layer), table = $("heads");
  $("heads-title").textContent = `Heads of layer ${state.layer}, timestep ${data.timesteps[state.timestep]}`;
  table.textContent = "";
  const names = {recall: "recall / random", coarse_share: "coarse share", entropy: "entropy",
    pair_overlap: "overlap of 2 / random", four_overlap: "of 4 / random", lists_largest: "most lists"};
  const kept = Object.keys(names).filter(name => mean(data.metrics[name].values[state.timestep][y]) != null);
  const head = table.insertRow();
  ["head", ...kept.map(name => names[name])].forEach(text => {
    const th = document.createElement("th"); th.textContent = text; head.append(th);
  });
  for (let h = 0; h < data.num_heads; h++) {
    const line = table.insertRow(), th = document.createElement("th");
    th.textContent = String(h); line.append(th); line.className = h === state.head ? "now" : "";
    const at = name => show(name, data.metrics[name].values[state.timestep][y][h]);
    kept.forEach(name => { line.insertCell().textContent = at(name) + (beside[name] ? ` / ${at(beside[name])}` : "") });
  }
}

function drawPopularity() {
  const lists = [...popularityNow()].sort((a, b) => b - a), average = lists.reduce((a, b) => a + b, 0) / N;
  const top = Math.max(lists[0], 1.5 * average), px = i => 44 + 546 * i / Math.max(N - 1, 1), py = v => 180 - 160 * v / top;
  const line = lists.map((v, i) => `${i ? "L" : "M"}${px(i).toFixed(1)},${py(v).toFixed(1)}`).join("");
  const level = (v, text) => `<line x1="44" x2="590" y1="${py(v)}" y2="${py(v)}" stroke="var(--soft)" stroke-dasharray="4 4"/>`
    + `<text x="590" y="${py(v) - 4}" text-anchor="end">${text}</text>`;
  $("popularity-title").textContent = `Popularity of kv tiles: layer ${state.layer}, ${headName()}, timestep ${data.timesteps[state.timestep]}`;
  $("popularity").innerHTML = level(average, `mean ${number(average)}`) + level(1.5 * average, "1.5 times the mean")
    + `<path d="${line}" fill="none" stroke="var(--selected)" stroke-width="2"/>`
    + `<line x1="44" x2="590" y1="180" y2="180" stroke="var(--line)"/>`
    + `<text x="40" y="${py(lists[0]) + 4}" text-anchor="end">${number(lists[0])}</text><text x="40" y="184" text-anchor="end">0</text>`
    + `<text x="44" y="198">most popular tile</text><text x="590" y="198" text-anchor="end">tile ${N} of ${N}</text>`;
  // of the same lists as the curve
  const share = holds => percent(lists.filter(holds).length / N);
  $("popularity-told").textContent = `Lists that hold a tile (${state.head === "all" ? "mean of " : ""}${headName()}): mean ${number(average)}, largest ${number(lists[0])}; `
    + `${share(v => v > 1.5 * average)} of the tiles are in more than 1.5 times the mean, ${share(v => v === 0)} in none.`;
}

let now = null, planned = false;
function refresh() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => { planned = false; drawAll() });
}

function drawAll() {
  $("timestep").value = state.timestep; $("timestep-now").textContent = data.timesteps[state.timestep];
  $("frame").value = state.frame; $("frame-now").textContent = data.frame_numbers[state.frame];
  for (const name of ["layer", "head", "query", "view", "metric"]) $(name).value = state[name];
  $("borders").checked = Boolean(state.borders);
  now = tell();
  const colour = paint();
  draw($("large"), state.frame, colour);
  document.querySelectorAll(".thumbs canvas").forEach(canvas => {
    draw(canvas, Number(canvas.dataset.frame), colour);
    canvas.parentElement.className = data.times[canvas.dataset.frame] === data.times[state.frame] ? "now" : "";
  });
  drawHeat(); drawHeads(); drawPopularity(); writeHash();
}

function choices(id, values, name = String) {
  values.forEach(value => {
    const option = document.createElement("option");
    option.value = value; option.textContent = name(value); $(id).append(option);
  });
}

function watch(canvas, frame) {
  canvas.onclick = event => { state.frame = frame(); setQuery(queryTiles[tokenUnder(event, frame())]); refresh() };
  canvas.onmousemove = event => {
    const tile = tiles[tokenUnder(event, frame())];
    $("hover").textContent = `tile ${tile} (${span(kvBoxes[tile])}): true attention ${percent(now.mass[tile])}`
      + (data.ranked ? `, coarse probability ${percent(now.coarse[tile])}` : "")
      + `, ${now.chosen[tile] ? (now.chosen[tile] < 1 ? `selected by ${percent(now.chosen[tile])} of heads` : "selected") : "not selected"}`;
  };
  canvas.onmouseleave = () => { $("hover").textContent = "\u00a0" };
}

function start() {
  choices("layer", shown.layers); choices("head", ["all", ...shown.heads]);
  choices("view", Object.keys(views), name => views[name]);
  choices("metric", Object.keys(data.metrics).filter(name => data.metrics[name].values.flat(2).some(x => x != null)),
    name => data.metrics[name].label);
  $("timestep").max = data.timesteps.length - 1; $("frame").max = data.frames.length - 1; $("query").max = data.num_queries - 1;
  state.timestep = data.timesteps.length >> 1;
  if (shown.queries.includes(data.first_query)) state.query = data.first_query;
  state.frame = ownFrame();
  const first = new Map();
  data.times.forEach((time, frame) => first.has(time) || first.set(time, frame));
  for (const [time, frame] of first) {
    const figure = document.createElement("figure"), canvas = document.createElement("canvas");
    const title = document.createElement("figcaption");
    title.textContent = `t ${time}, frame ${data.frame_numbers[frame]}`;
    canvas.dataset.frame = frame; watch(canvas, () => frame); figure.append(canvas, title); $("thumbs").append(figure);
  }
  $("thumbs").style.setProperty("--thumb", first.size <= 4 ? "260px" : first.size <= 9 ? "165px" : "118px");
  watch($("large"), () => state.frame);
  for (const name of ["timestep", "frame"]) $(name).oninput = event => { state[name] = Number(event.target.value); refresh() };
  for (const name of ["view", "metric"]) $(name).onchange = event => { state[name] = event.target.value; refresh() };
  $("layer").onchange = event => { state.layer = Number(event.target.value); refresh() };
  $("head").onchange = event => { state.head = event.target.value === "all" ? "all" : Number(event.target.value); refresh() };
  $("query").onchange = event => { setQuery(Number(event.target.value)); refresh() };
  $("borders").onchange = event => { state.borders = event.target.checked ? 1 : 0; refresh() };
  data.frames.forEach((source, i) => { pictures[i] = new Image(); pictures[i].onload = refresh; pictures[i].src = source });
  readHash();
  window.onhashchange = () => { readHash(); refresh() };
  window.onresize = refresh;
  drawAll();
}
start();
})();
