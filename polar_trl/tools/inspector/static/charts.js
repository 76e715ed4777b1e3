// Curves as SVG. The legend of a chart says its values at the step under the pointer, or at the last one.

import { h, replace, svg } from "./dom.js";
import { number, words } from "./format.js";

const HEIGHT = 168;
const MARGIN = { left: 46, right: 10, top: 8, bottom: 22 };
const COLORS = 8;

/** Charts that share a step under the pointer. */
export class ChartGrid {
  constructor(root) {
    this.root = root;
    this.cards = new Map();
    this.step = null;
    this.observer = new ResizeObserver(() => this.cards.forEach((card) => card.draw()));
    this.observer.observe(root);
  }

  show(charts) {
    for (const [title, card] of this.cards) {
      if (!charts.some((chart) => chart.title === title)) {
        card.element.remove();
        this.cards.delete(title);
      }
    }
    for (const chart of charts) {
      if (!this.cards.has(chart.title)) {
        const card = new Card(this);
        this.cards.set(chart.title, card);
      }
      const card = this.cards.get(chart.title);
      this.root.append(card.element);
      card.chart = chart;
      card.draw();
    }
  }

  point(step) {
    if (step === this.step) return;
    this.step = step;
    this.cards.forEach((card) => card.drawPointer());
  }

  close() {
    this.observer.disconnect();
  }
}

class Card {
  constructor(grid) {
    this.grid = grid;
    this.title = h("h3");
    this.hint = h("p", { class: "hint" });
    this.plot = h("div", { class: "plot", tabindex: "0" });
    this.legend = h("div", { class: "legend" });
    this.element = h("section", { class: "card chart" }, this.title, this.hint, this.plot, this.legend);
    this.plot.addEventListener("pointermove", (event) => this.grid.point(this.findStep(event.offsetX)));
    this.plot.addEventListener("pointerleave", () => this.grid.point(null));
    this.plot.addEventListener("blur", () => this.grid.point(null));
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const steps = this.steps();
    const at = this.grid.step === null ? steps.length - 1 : steps.indexOf(this.grid.step) + move;
    this.grid.point(steps[Math.min(steps.length - 1, Math.max(0, at))]);
  }

  steps() {
    return [...new Set([...this.chart.steps, ...this.chart.evaluated.map(([step]) => step)])].sort((a, b) => a - b);
  }

  draw() {
    const chart = this.chart;
    const width = this.plot.clientWidth;
    if (!chart || !width) return;
    replace(this.title, chart.title, chart.unit ? h("span", { class: "unit" }, chart.unit) : null);
    replace(this.hint, chart.hint);
    this.plot.setAttribute("aria-label", `${chart.title}. Arrow keys move over the steps.`);
    this.plot.setAttribute("role", "img");
    const steps = this.steps();
    const [first, last] = [steps[0], steps.at(-1)];
    const pad = chart.kind === "stack" || first === last ? 0.5 : 0;
    const span = Math.max(last - first + 2 * pad, 1);
    const inner = width - MARGIN.left - MARGIN.right;
    this.x = (step) => MARGIN.left + ((step - first + pad) / span) * inner;
    const axis = buildAxis(chart);
    const y = (value) => MARGIN.top + (1 - axis.place(value)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const picture = svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
    for (const tick of axis.ticks) {
      picture.append(svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }));
      const label = svg("text", { class: "tick", x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" });
      label.textContent = number(tick, 3);
      picture.append(label);
    }
    for (const step of pickSteps(first, last, inner)) {
      const label = svg("text", { class: "tick", x: this.x(step), y: HEIGHT - 5, "text-anchor": "middle" });
      label.textContent = number(step);
      picture.append(label);
    }
    if (chart.kind === "stack") this.drawStack(picture, y, inner / span);
    else this.drawLines(picture, y, axis);
    for (const [step, value] of chart.evaluated) {
      const [cx, cy] = [this.x(step), y(value)];
      picture.append(svg("path", { class: "evaluated", d: `M${cx} ${cy - 5}L${cx + 5} ${cy}L${cx} ${cy + 5}L${cx - 5} ${cy}Z` }));
    }
    this.pointer = svg("line", { class: "pointer", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
    picture.append(this.pointer);
    replace(this.plot, picture);
    this.drawPointer();
  }

  drawLines(picture, y, axis) {
    this.chart.series.forEach((series, number_) => {
      let path = "";
      let pen = "M";
      series.values.forEach((value, index) => {
        if (value === null || (axis.isLog && value <= 0)) {
          pen = "M";
          return;
        }
        path += `${pen}${this.x(this.chart.steps[index]).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      });
      const name = `line s${number_ % COLORS}`;
      picture.append(svg("path", { class: name, d: path }));
      if (series.values.length <= 40) {
        series.values.forEach((value, index) => {
          if (value === null || (axis.isLog && value <= 0)) return;
          picture.append(svg("circle", { class: `dot s${number_ % COLORS}`, cx: this.x(this.chart.steps[index]), cy: y(value), r: 2.5 }));
        });
      }
    });
  }

  drawStack(picture, y, spacing) {
    const sums = this.chart.steps.map(() => 0);
    const half = Math.max(0.5, Math.min(spacing * 0.42, 22));
    this.chart.series.forEach((series, number_) => {
      let path = "";
      series.values.forEach((value, index) => {
        if (!value) return;
        const [x, low] = [this.x(this.chart.steps[index]), sums[index]];
        sums[index] += value;
        path += `M${(x - half).toFixed(1)} ${y(low).toFixed(1)}V${y(sums[index]).toFixed(1)}h${(2 * half).toFixed(1)}V${y(low).toFixed(1)}Z`;
      });
      picture.append(svg("path", { class: `area s${number_ % COLORS}`, d: path }));
    });
  }

  drawPointer() {
    if (!this.pointer) return;
    const step = this.grid.step;
    const isHere = step !== null && this.steps().includes(step);
    this.pointer.setAttribute("visibility", isHere ? "visible" : "hidden");
    if (isHere) {
      this.pointer.setAttribute("x1", this.x(step));
      this.pointer.setAttribute("x2", this.x(step));
    }
    const shown = isHere ? step : this.chart.steps.at(-1);
    const index = this.chart.steps.indexOf(shown);
    const evaluated = this.chart.evaluated.findLast(([at]) => at <= (isHere ? step : Infinity));
    replace(
      this.legend,
      h("span", { class: "step" }, `step ${number(isHere ? step : this.steps().at(-1))}`),
      this.chart.series.map((series, number_) =>
        h("span", { class: "entry" }, h("i", { class: `swatch ${this.chart.kind === "stack" ? "" : "dash"} s${number_ % COLORS}` }), words(series.name),
          h("b", {}, number(series.values[index] ?? null)))),
      evaluated ? h("span", { class: "entry" }, h("i", { class: "swatch evaluated" }), `evaluation (step ${evaluated[0]})`, h("b", {}, number(evaluated[1]))) : null,
    );
  }

  findStep(offset) {
    const steps = this.steps();
    return steps.reduce((best, step) => (Math.abs(this.x(step) - offset) < Math.abs(this.x(best) - offset) ? step : best), steps[0]);
  }
}

function buildAxis(chart) {
  let values = chart.series.flatMap((series) => series.values).filter((value) => value !== null);
  values.push(...chart.evaluated.map(([, value]) => value));
  if (chart.kind === "log") {
    values = values.filter((value) => value > 0);
    if (values.length) return buildLogAxis(Math.min(...values), Math.max(...values));
  }
  if (chart.kind === "stack") {
    values = chart.steps.map((_, index) => chart.series.reduce((sum, series) => sum + (series.values[index] ?? 0), 0));
  }
  const low = values.reduce((a, b) => Math.min(a, b), 0);
  let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (high <= low) high = low + 1;
  const step = niceStep((high - low) / 4);
  const [bottom, top] = [Math.floor(low / step) * step, Math.ceil(high / step - 1e-9) * step];
  const ticks = [];
  for (let tick = bottom; tick <= top + step / 2; tick += step) ticks.push(Number(tick.toPrecision(10)));
  return { ticks, isLog: false, place: (value) => (value - bottom) / (top - bottom) };
}

function buildLogAxis(least, most) {
  const low = Math.floor(Math.log10(least));
  const high = Math.max(low + 1, Math.ceil(Math.log10(most)));
  const every = Math.ceil((high - low) / 5);
  const ticks = [];
  for (let power = low; power <= high; power += every) ticks.push(10 ** power);
  return { ticks, isLog: true, place: (value) => (Math.log10(value) - low) / (high - low) };
}

function niceStep(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value * (1 - 1e-9)) * power;
}

function pickSteps(first, last, width) {
  const every = Math.max(1, Math.round(niceStep(Math.max(1e-9, (last - first) / Math.max(2, width / 60)))));
  const steps = [];
  for (let step = Math.ceil(first / every) * every; step <= last; step += every) steps.push(step);
  return steps;
}
