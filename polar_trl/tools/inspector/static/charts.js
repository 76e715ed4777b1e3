// Curves drawn by uPlot (vendor/), which index.html loads as a global. All charts share one cursor; a chart's legend
// has its values at the step under the cursor, or at the last one.

import { h, replace } from "./dom.js";
import { number, words } from "./format.js";
import { onThemeChange } from "./scales.js";

const { uPlot } = globalThis;
const HEIGHT = 168;
const COLORS = 8;
const DASHES = [undefined, [6, 3], [2, 2.5]];
const MOST_DOTS = 40;
const SYNC = "step";
const HIDDEN = { left: -10, top: -10 };
const STEP_INCREMENTS = Array.from({ length: 9 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

export class ChartGrid {
  constructor(root) {
    this.root = root;
    this.cards = new Map();
    this.observer = new ResizeObserver(() => this.cards.forEach((card) => card.resize()));
    this.observer.observe(root);
    this.stopTheme = onThemeChange(() => this.cards.forEach((card) => card.plot.redraw()));
  }

  show(charts) {
    for (const [title, card] of this.cards) {
      if (!charts.some((chart) => chart.title === title)) {
        card.remove();
        this.cards.delete(title);
      }
    }
    for (const chart of charts) {
      if (!this.cards.has(chart.title)) this.cards.set(chart.title, new Card());
      const card = this.cards.get(chart.title);
      this.root.append(card.element);
      card.show(chart);
    }
  }

  close() {
    this.observer.disconnect();
    this.stopTheme();
    this.cards.forEach((card) => card.remove());
  }
}

class Card {
  constructor() {
    this.title = h("h3");
    this.hint = h("p", { class: "hint" });
    this.frame = h("div", { class: "plot", tabindex: "0", role: "img" });
    this.legend = h("div", { class: "legend" });
    this.element = h("section", { class: "card chart" }, this.title, this.hint, this.frame, this.legend);
    this.frame.addEventListener("keydown", (event) => this.onKey(event));
    this.frame.addEventListener("blur", () => uPlot.sync(SYNC).plots.forEach((plot) => plot.setCursor(HIDDEN)));
  }

  show(chart) {
    const at = this.plot?.cursor.idx ?? null;
    this.plot?.destroy();
    this.chart = chart;
    replace(this.title, chart.title, chart.unit ? h("span", { class: "unit" }, chart.unit) : null);
    replace(this.hint, chart.hint);
    this.frame.setAttribute("aria-label", `${chart.title}. Arrow keys move over the steps.`);
    this.plot = new uPlot(buildOptions(chart, this.frame.clientWidth, () => this.drawLegend()), joinSteps(chart), this.frame);
    this.drawLegend();
    // uPlot places its scales in a microtask, before which no step has a position
    if (at !== null) queueMicrotask(() => this.point(at, false));
  }

  remove() {
    this.plot.destroy();
    this.element.remove();
  }

  resize() {
    this.plot.setSize({ width: this.frame.clientWidth, height: HEIGHT });
  }

  onKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const last = this.plot.data[0].length - 1;
    const at = this.plot.cursor.idx ?? null;
    this.point(at === null ? last : Math.min(last, Math.max(0, at + move)), true);
  }

  /** Put the cursor on a step, by its index; `isShared`: in all charts. */
  point(at, isShared) {
    this.plot.setCursor({ left: this.plot.valToPos(this.plot.data[0][at], "x"), top: 0 }, true, isShared);
  }

  drawLegend() {
    if (!this.plot) return; // uPlot fires the hook once while it is made
    const { kind, series, evaluated, steps } = this.chart;
    const all = this.plot.data[0];
    const at = this.plot.cursor.idx ?? null;
    const index = at === null ? steps.length - 1 : steps.indexOf(all[at]);
    const evaluation = evaluated.findLast(([step]) => at === null || step <= all[at]);
    const dash = kind === "stack" ? "" : "dash";
    replace(
      this.legend,
      h("span", { class: "step" }, `step ${number(at === null ? all.at(-1) : all[at])}`),
      series.map(({ name, values }, place) =>
        h("span", { class: "entry" }, h("i", { class: `swatch ${dash} s${place % COLORS}` }), words(name), h("b", {}, number(values[index] ?? null)))),
      evaluation ? h("span", { class: "entry" }, h("i", { class: "swatch evaluated" }), `evaluation (step ${evaluation[0]})`, h("b", {}, number(evaluation[1]))) : null,
    );
  }
}

/** Columns for uPlot: all steps, the values of each drawn series, those of the evaluation where there is one. */
function joinSteps({ kind, steps, series, evaluated }) {
  let columns = series.map(({ values }) => values);
  if (kind === "log") columns = columns.map((values) => values.map((value) => (value > 0 ? value : null)));
  if (kind === "stack") columns = stack(columns);
  const tables = [[steps, ...columns]];
  if (evaluated.length) tables.push([evaluated.map(([step]) => step), evaluated.map(([, value]) => value)]);
  return uPlot.join(tables);
}

/** Sums from the bottom of a stack, the highest first: each bar hides the lower part of the one drawn before it. */
function stack(columns) {
  const sums = [];
  for (const values of columns) sums.unshift(values.map((value, index) => (value ?? 0) + (sums[0]?.[index] ?? 0)));
  return sums;
}

function buildOptions({ kind, series, evaluated, steps }, width, onCursor) {
  const isStack = kind === "stack";
  const isLog = kind === "log" && series.some(({ values }) => values.some((value) => value > 0));
  const places = series.map((_, place) => place);
  const lines = (isStack ? places.reverse() : places).map((place) => {
    const color = () => readColor(`--s${place % COLORS}`);
    if (isStack) return { fill: color, width: 0, paths: uPlot.paths.bars({ size: [0.84, 44] }), points: { show: false } };
    return { stroke: color, width: 1.8, dash: DASHES[place], points: { show: steps.length <= MOST_DOTS, size: 5, fill: color } };
  });
  if (evaluated.length) {
    const points = { show: true, width: 1.5, stroke: () => readColor("--text"), fill: () => readColor("--back"), paths: drawDiamonds };
    lines.push({ paths: () => null, points });
  }
  const axis = { stroke: () => readColor("--soft"), font: "11px system-ui", ticks: { show: false } };
  const format = (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick)));
  return {
    width,
    height: HEIGHT,
    padding: [8, 10, 0, 0],
    legend: { show: false },
    cursor: {
      sync: { key: SYNC },
      y: false,
      drag: { x: false, y: false },
      points: { show: false },
      move: (plot, left, top) => [left < 0 ? left : plot.valToPos(plot.data[0][plot.posToIdx(left)], "x"), top],
    },
    hooks: { setCursor: [onCursor] },
    scales: {
      x: { time: false, range: (_, low, high) => (isStack || low === high ? [low - 0.5, high + 0.5] : [low, high]) },
      y: isLog ? { distr: 3, range: (_, low, high) => uPlot.rangeLog(low, high, 10, true) } : { range: includeZero },
    },
    axes: [
      { ...axis, size: 24, gap: 6, space: 60, incrs: STEP_INCREMENTS, grid: { show: false }, values: format },
      { ...axis, size: 46, gap: 6, grid: { stroke: () => readColor("--line"), width: 1 }, values: format, ...(isLog ? { splits: listPowers } : {}) },
    ],
    series: [{}, ...lines],
  };
}

function includeZero(_, low, high) {
  const top = low < 0 || high > 0 ? Math.max(0, high) : 1;
  return uPlot.rangeNum(Math.min(0, low), top, { min: { pad: 0.1, soft: 0, mode: 1 }, max: { pad: 0.1 } });
}

function listPowers(_, __, low, high) {
  const [first, last] = [low, high].map((value) => Math.round(Math.log10(value)));
  return Array.from({ length: last - first + 1 }, (___, place) => 10 ** (first + place));
}

function drawDiamonds(plot, index, first, last) {
  const path = new Path2D();
  const size = 5 * uPlot.pxRatio;
  for (let at = first; at <= last; at += 1) {
    const value = plot.data[index][at];
    if (value === null || value === undefined) continue;
    const [x, y] = [plot.valToPos(plot.data[0][at], "x", true), plot.valToPos(value, "y", true)];
    path.moveTo(x, y - size);
    for (const [dx, dy] of [[1, 0], [0, 1], [-1, 0]]) path.lineTo(x + dx * size, y + dy * size);
    path.closePath();
  }
  return { stroke: path, fill: path };
}

function readColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}
