// Tasks: a map of their rewards by step, and a table of an evaluation's pass rates.

import { h } from "./dom.js";
import { count, number, percent } from "./format.js";
import { buildScale, onThemeChange, palette } from "./scales.js";

const FIRST_TASKS = 40;

/** A map of tasks by steps. `at({task, step})` is the address of a cell's sessions. */
export function buildTaskMap(title, hint, map, at) {
  const body = h("div", { class: "heat", style: { "--columns": map.columns.length } });
  let limit = FIRST_TASKS;
  const draw = () => {
    const scale = buildScale(palette().sequential, map.low, map.high);
    const shown = map.tasks.slice(0, limit);
    const left = map.tasks.length - shown.length;
    const dropped = map.num_tasks - map.tasks.length;
    body.replaceChildren(
      buildSteps(map.columns),
      ...shown.map((task) => buildTaskRow(task, map.columns, scale, at)),
      ...(left ? [h("button", { type: "button", class: "more", on: { click: () => { limit = Infinity; draw(); } } }, `Show ${count(left)} more`)] : []),
      ...(dropped ? [h("p", { class: "hint" }, `${count(dropped)} more tasks, of the lowest means, are not shown.`)] : []),
      h("p", { class: "scale" }, h("span", { class: "ramp" }, number(map.low), h("i", { style: { background: `linear-gradient(to right, ${scale.stops.join(", ")})` } }), `${number(map.high)} mean reward`)),
    );
  };
  draw();
  const stop = onThemeChange(() => (body.isConnected ? draw() : stop()));
  return h("section", { class: "card" }, h("h2", {}, title), h("p", { class: "hint" }, hint), body);
}

function buildSteps(columns) {
  const every = Math.ceil(columns.length / 12);
  return h("div", { class: "heat-row steps", "aria-hidden": "true" }, h("span", { class: "task" }, "step"),
    columns.map(([first], place) => (place % every ? null : h("span", { style: { "grid-column": place + 2 } }, first))));
}

function buildTaskRow(task, columns, scale, at) {
  return h("div", { class: "heat-row" },
    h("a", { class: "task", href: at({ task: task.task }), title: task.task }, task.task),
    task.cells.map(({ column, mean, sessions }) => {
      const [first, last] = columns[column];
      const steps = first === last ? `${first}` : `${first}-${last}`;
      const color = scale.color(mean);
      return h("a", {
        class: "cell", href: at({ task: task.task, step: steps }),
        title: `${task.task}, step ${steps}: mean reward ${number(mean)} of ${count(sessions)}`,
        style: { "grid-column": column + 2, "background-color": color.back },
      });
    }),
    h("span", { class: "mean", style: { "grid-column": columns.length + 2 } }, number(task.mean)));
}

/** pass@k of an evaluation, and its tasks with their intervals. `at({task})` is the address of a task's sessions. */
export function buildTaskTable({ pass_at: rates, tasks }, at) {
  const range = (low, high) => (low === null ? "–" : `${percent(low)} to ${percent(high)}`);
  return [
    h("section", { class: "card" },
      h("h2", {}, "pass@k"),
      h("p", { class: "hint" }, "At least one of k sessions passes, mean over tasks, with the 95 % interval over tasks."),
      h("table", { class: "plain" },
        h("thead", {}, h("tr", {}, ["k", "rate", "95 % interval", "tasks"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rates.map((rate) => h("tr", {}, h("th", { scope: "row" }, `pass@${rate.k}`), h("td", { class: "right" }, percent(rate.rate)),
          h("td", {}, range(rate.low, rate.high)), h("td", { class: "right" }, `${count(rate.num_tasks)}${rate.num_left_out ? ` (${count(rate.num_left_out)} left out)` : ""}`)))))),
    h("section", { class: "card" },
      h("h2", {}, "Tasks"),
      h("div", { class: "scroll" }, h("table", { class: "plain" },
        h("thead", {}, h("tr", {}, ["task", "passed", "rate", "95 % interval", "without a reward"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, tasks.map((task) => h("tr", {},
          h("th", { scope: "row" }, h("a", { href: at({ task: task.task }) }, task.task)),
          h("td", { class: "right" }, `${count(task.passed)} of ${count(task.graded)}`),
          h("td", { class: "right" }, task.graded ? percent(task.passed / task.graded) : "–"),
          h("td", {}, task.interval ? range(...task.interval) : "–"),
          h("td", { class: "right" }, task.failed ? count(task.failed) : ""))))))),
  ];
}
