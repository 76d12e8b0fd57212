// Draws the charts of the page from the data beside them, and lets its tables be sorted; where this does not run,
// pictures stand in place of the charts.
"use strict";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 560px)");
const charts = JSON.parse(document.getElementById("charts").textContent);

function layoutOf(panel) {
  const ink = dark.matches ? "#9aa5b1" : "#59636e";
  const grid = dark.matches ? "#2b323a" : "#e6eaee";
  const axis = { gridcolor: grid, linecolor: grid, zeroline: false, automargin: true, exponentformat: "power" };
  return {
    showlegend: false,
    hovermode: "closest",
    dragmode: narrow.matches ? false : "zoom",
    margin: { l: 10, r: 12, t: 12, b: 10 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: ink, size: narrow.matches ? 11 : 13, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { namelength: -1 },
    xaxis: { ...axis, ...panel.x, nticks: narrow.matches ? 5 : 0 },
    // the distance makes room for numbers of any length
    yaxis: { ...axis, ...panel.y, title: { ...panel.y.title, standoff: 12 } },
  };
}

function pressed(button, on) {
  button.setAttribute("aria-pressed", String(on));
}

function draw(chart) {
  const figure = document.getElementById("chart-" + chart.key);
  const plot = figure.querySelector(".plot");
  const legend = figure.querySelector(".legend");
  const switches = figure.querySelector(".switches");
  const choice = [...chart.panels[0].key];
  // by label: what a reader turned on or off stays so in every panel
  const turned = new Map();

  function panel() {
    const fits = (part) => part.key.every((value, i) => value === choice[i]);
    return chart.panels.find(fits) || chart.panels.find((part) => part.key[0] === choice[0]);
  }

  function render() {
    const now = panel();
    now.key.forEach((value, i) => (choice[i] = value));
    const traces = now.traces.map((trace) => {
      const on = turned.has(trace.label) ? turned.get(trace.label) : trace.visible !== false;
      return { ...trace, visible: on };
    });
    for (const button of switches.querySelectorAll("button")) {
      pressed(button, choice[Number(button.dataset.part)] === button.dataset.value);
    }
    legend.replaceChildren();
    for (const trace of traces) {
      if (trace.band || !trace.label) continue;
      const button = document.createElement("button");
      const dot = document.createElement("span");
      dot.className = "dot";
      dot.style.background = trace.line ? trace.line.color : trace.marker.color;
      button.append(dot, trace.label);
      button.type = "button";
      pressed(button, trace.visible);
      button.onclick = () => {
        turned.set(trace.label, !trace.visible);
        render();
      };
      legend.append(button);
    }
    return Plotly.react(plot, traces, layoutOf(now), { responsive: true, displaylogo: false, displayModeBar: false });
  }

  chart.switches.forEach((name, part) => {
    const values = [...new Set(chart.panels.map((each) => each.key[part]))];
    if (values.length < 2) return;
    const group = document.createElement("fieldset");
    group.setAttribute("aria-label", name);
    for (const value of values) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = value;
      button.dataset.part = String(part);
      button.dataset.value = value;
      button.onclick = () => {
        choice[part] = value;
        render();
      };
      group.append(button);
    }
    switches.append(group);
  });
  figure.classList.add("drawn");
  // the picture goes when the plot stands
  render().then(() => figure.querySelectorAll("img").forEach((image) => image.remove()));
  dark.addEventListener("change", render);
  narrow.addEventListener("change", render);
}

// A click on a heading sorts the rows by that column, a second one the other way round; what is empty comes last.
function sortable(table) {
  const body = table.tBodies[0];
  const headings = [...table.tHead.rows[0].cells];
  const scales = { k: 1e3, M: 1e6, B: 1e9 };
  const valueOf = (row, column) => {
    // without what stands smaller below it
    const nodes = [...row.cells[column].childNodes].filter((each) => each.nodeType === Node.TEXT_NODE);
    const text = nodes.map((each) => each.textContent).join("").trim();
    const value = text === "inf" ? Infinity : parseFloat(text) * (scales[text.slice(-1)] || 1);
    return { text, value };
  };
  headings.forEach((heading, column) => {
    heading.tabIndex = 0;
    const sort = () => {
      const up = heading.getAttribute("aria-sort") !== "ascending";
      const rows = [...body.rows].map((row) => ({ row, ...valueOf(row, column) }));
      const numbers = rows.some((each) => !Number.isNaN(each.value)) && column > 0;
      const empty = (each) => (numbers ? Number.isNaN(each.value) : each.text === "");
      rows.sort((a, b) => {
        if (empty(a) || empty(b)) return empty(a) - empty(b);
        const order = numbers ? (a.value === b.value ? 0 : a.value - b.value) : a.text.localeCompare(b.text);
        return up ? order : -order;
      });
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", up ? "ascending" : "descending");
      body.append(...rows.map((each) => each.row));
    };
    heading.onclick = sort;
    heading.onkeydown = (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        sort();
      }
    };
  });
}

// Long names of settings and methods break after a dot or an underscore, where a narrow column has to break them.
function breakable(cell) {
  for (const node of [...cell.childNodes]) {
    if (node.nodeType !== Node.TEXT_NODE) continue;
    const parts = node.textContent.split(/(?<=[._])(?=\w)/);
    node.replaceWith(...parts.flatMap((part, i) => (i ? [document.createElement("wbr"), part] : [part])));
  }
}

charts.forEach(draw);
document.querySelectorAll("td:first-child").forEach(breakable);
document.querySelectorAll("section:not(.clips) table").forEach(sortable);
