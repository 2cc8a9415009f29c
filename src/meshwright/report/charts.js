"use strict";
// Draws a page's figures with plotly, in the page's colours, and makes them readable by keyboard.
// A chart is an element `.chart` with its figure as JSON inside; it is drawn once it is visible.

const charts = (() => {
  const CHARACTER = 7.3; // pixels per character of a strategy's name
  const LINE = 15; // pixels per additional line of it
  const TICK = 66; // pixels per axis label
  const PAUSE = 80; // milliseconds until a tooltip is rendered
  const ZOOMS = { "+": 0.5, "=": 0.5, "-": 2, 0: Infinity };
  const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const fingers = matchMedia("(pointer: coarse)");
  const known = new Map(); // chart -> its figure and keyboard position
  // One at a time, so that the first are visible while the others are drawn.
  const sizes = new ResizeObserver((entries) => entries.forEach((entry) => setTimeout(resized, 0, entry.target)));

  // A copy with CSS variables replaced by their current colours.
  function painted(value, style) {
    if (Array.isArray(value)) return value.map((one) => painted(one, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, painted(one, style)]));
    return /^var\(--\w+\)$/.test(value) ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
  }

  // Wrap a strategy between its terms, in lines of `most` characters.
  function folded(text, most) {
    const lines = [""];
    for (const term of text.split(/(?<=,)/)) {
      if (lines.at(-1) && lines.at(-1).length + term.length > most) lines.push("");
      lines[lines.length - 1] += term;
    }
    return lines;
  }

  // The layout for a width: wrap names above bars, and keep axis labels apart.
  function fitted(layout, width) {
    const names = (layout.annotations || []).filter((one) => one.name === "strategy");
    const most = Math.max(12, width / CHARACTER - layout.meta?.total - 1);
    let lines = 1;
    for (const name of names) {
      const found = folded(name.text, most);
      lines = Math.max(lines, found.length);
      name.text = found.join("<br>");
    }
    for (const [key, axis] of Object.entries(layout)) {
      if (/^xaxis/.test(key) && axis.ticksuffix) axis.nticks = Math.max(2, Math.floor((width * (layout.xaxis2 ? 0.5 : 1)) / TICK));
    }
    const more = LINE * (lines - 1);
    const margin = { ...layout.margin, t: layout.margin.t + more }; // there is no gap above the first name
    const height = layout.height + more * (names.length + 1);
    return { ...layout, width, height, margin, dragmode: fingers.matches ? false : layout.dragmode };
  }

  async function draw(chart) {
    const state = known.get(chart);
    const width = chart.clientWidth;
    if (!state || !window.Plotly || !chart.checkVisibility()) return; // removed, too early, or hidden
    state.width = width;
    const { data, layout, config } = painted(state.figure, getComputedStyle(chart));
    await Plotly.react(state.plot, data, fitted(layout, width), config);
    if (state.width === width) chart.dataset.drawn = width;
  }

  function resized(chart) {
    if (known.get(chart)?.width !== chart.clientWidth) draw(chart);
  }

  // Keyboard order: rows from top to bottom, each from left to right.
  function rowsOf(figure) {
    const rows = new Map();
    figure.data.forEach((trace, curveNumber) => {
      if (trace.visible === false) return;
      trace.x.forEach((x, pointNumber) => {
        if (trace.y[pointNumber] === null) return;
        const isBar = trace.type === "bar";
        const key = isBar ? trace.y[pointNumber] : curveNumber;
        if (!rows.has(key)) rows.set(key, []);
        const row = rows.get(key);
        const at = isBar ? (trace.base?.[pointNumber] ?? row.at(-1)?.end ?? 0) : x;
        row.push({ key, at, end: at + x, trace, curveNumber, pointNumber });
      });
    });
    const sorted = [...rows].sort(([a], [b]) => a - b);
    return sorted.map(([, row]) => row.sort((a, b) => a.at - b.at));
  }

  function move(chart, [down, right]) {
    const state = known.get(chart);
    const rows = rowsOf(state.figure);
    if (!rows.length) return;
    const clip = (index, list) => Math.min(Math.max(index, 0), list.length - 1);
    const nearest = (row, at) => row.reduce((a, b) => (Math.abs(b.at - at) < Math.abs(a.at - at) ? b : a));
    if (!state.stop) state.stop = rows[0][0];
    else {
      const index = rows.findIndex((row) => row[0].key >= state.stop.key);
      const row = rows[clip((index < 0 ? rows.length : index) + down, rows)];
      const same = row.findIndex((one) => one.trace === state.stop.trace && one.pointNumber === state.stop.pointNumber);
      state.stop = down || same < 0 ? nearest(row, state.stop.at) : row[clip(same + right, row)];
    }
    return tell(chart);
  }

  // Show plotly's tooltip at the keyboard position, and its text to screen readers.
  async function tell(chart) {
    const { plot, stop } = known.get(chart);
    const { trace, curveNumber, pointNumber } = stop;
    const [start, end] = plot.layout[axisOf(trace)].range;
    if (middle(stop) < start || middle(stop) > end) await zoom(chart, 1);
    Plotly.Fx.hover(plot, [{ curveNumber, pointNumber }], `${trace.xaxis || "x"}y`);
    setTimeout(() => plot.querySelector(".hovertext")?.scrollIntoView({ block: "nearest" }), PAUSE);
    const words = trace.hovertext[pointNumber].replaceAll("<br>", ", ");
    said(chart).textContent = new DOMParser().parseFromString(words, "text/html").body.textContent;
  }

  function middle({ trace, pointNumber }) {
    const x = trace.x[pointNumber];
    return trace.base ? trace.base[pointNumber] + x / 2 : x;
  }

  // Scale the visible range by `times` around the keyboard position; Infinity shows everything.
  async function zoom(chart, times) {
    const { plot, figure, stop } = known.get(chart);
    const name = axisOf(stop?.trace);
    if (figure.layout[name].fixedrange) return;
    const [first, last] = figure.layout[name].range;
    const [start, end] = plot.layout[name].range;
    const half = Math.min(((end - start) * times) / 2, (last - first) / 2);
    const from = Math.min(Math.max((stop ? middle(stop) : (start + end) / 2) - half, first), last - 2 * half);
    await Plotly.relayout(plot, { [`${name}.range`]: [from, from + 2 * half] });
  }

  function axisOf(trace) {
    return (trace?.xaxis || "x").replace("x", "xaxis");
  }

  function said(chart) {
    return chart.parentElement.querySelector(".said");
  }

  function leave(chart) {
    const state = known.get(chart);
    state.stop = null;
    said(chart).textContent = "";
    if (chart.dataset.drawn) Plotly.Fx.unhover(state.plot);
  }

  function toggle(button) {
    const chart = button.closest("figure").querySelector(".chart");
    const isShown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", isShown);
    for (const number of button.dataset.traces.split(" ")) known.get(chart).figure.data[number].visible = isShown;
    return draw(chart);
  }

  // Show all charts below an element; call `clear` before removing them.
  function show(root) {
    for (const chart of root.querySelectorAll(".chart")) {
      const figure = JSON.parse(chart.querySelector("script").textContent);
      known.set(chart, { figure, plot: chart.querySelector(".plot"), stop: null });
      sizes.observe(chart);
    }
  }

  function clear(root) {
    for (const chart of root.querySelectorAll(".chart")) {
      sizes.unobserve(chart);
      if (chart.dataset.drawn) Plotly.purge(known.get(chart).plot);
      known.delete(chart);
    }
  }

  document.addEventListener("keydown", (event) => {
    const chart = event.target;
    if (!known.has(chart) || !chart.dataset.drawn || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") leave(chart);
    else if (event.key in MOVES) move(chart, MOVES[event.key]);
    else if (event.key in ZOOMS) zoom(chart, ZOOMS[event.key]).then(() => known.get(chart)?.stop && tell(chart));
    else return;
    event.preventDefault();
  });
  document.addEventListener("focusout", (event) => known.has(event.target) && leave(event.target));
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".legend button");
    if (button) toggle(button);
  });
  dark.addEventListener("change", () => [...known.keys()].forEach(draw));
  // A page may request its charts before plotly is loaded.
  addEventListener("load", () => known.forEach((_, chart) => setTimeout(resized, 0, chart)));
  show(document);
  return { show, clear };
})();
