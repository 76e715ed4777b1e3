// The page of a run: its result in figures, its curves or pass rates, its tasks by step, and how its sessions ended.

import { ask, h, notice, replace } from "./dom.js";
import { ChartGrid } from "./charts.js";
import { count, number, percent, plural, words } from "./format.js";
import { buildTaskMap, buildTaskTable } from "./tasks.js";

export async function showRun(root, params, first) {
  const facts = h("dl", { class: "facts" });
  const note = h("div");
  const chartRoot = h("div", { class: "charts" });
  const tasks = h("div", { class: "tasks" });
  const ends = h("div");
  const settings = h("details", { class: "settings" });
  replace(root, h("h1", { class: "sr" }, "Run"), facts, note, chartRoot, tasks, ends, settings);
  const grid = new ChartGrid(chartRoot);
  let seen = null;

  async function update(run) {
    const version = `${run.curves_version}/${run.sessions_version}`;
    if (version === seen) return;
    seen = version;
    drawFacts(facts, run);
    drawEnds(ends, run);
    drawSettings(settings, run);
    const [{ charts }, found] = await Promise.all([ask("curves", { run: run.number }), ask("tasks", { run: run.number })]);
    grid.show(charts);
    drawTasks(tasks, found, run);
    const empty = run.has_curves
      ? "No step has been logged yet. Curves appear after the first one."
      : "This folder has sessions and no training steps, so there are no curves.";
    replace(
      note,
      run.lessons.taught_nothing ? notice(describeLessons(run.lessons)) : null,
      run.settings_problem ? notice(`${run.settings_problem}: model, agent and number of steps are not known.`, "bad") : null,
      charts.length || found.tasks.length ? null : notice(empty),
    );
  }

  await update(first);
  return { update, navigate() {}, close: () => grid.close() };
}

function drawFacts(root, run) {
  const { choices, figures: { reward, evaluations, failure } } = run;
  const steps = `${count(run.step)}${run.max_steps ? ` of ${count(run.max_steps)}` : ""}`;
  const mean = choices.mean_reward === null ? "–" : `${number(choices.mean_reward)} (${count(choices.num_rewards)} graded)`;
  const version = run.settings.agent_version;
  const facts = [
    ["Model", run.model ?? "–"],
    ["Agent", run.agent === null ? "–" : version ? `${run.agent} ${version}` : run.agent],
    ["Step", run.step === null ? "–" : steps],
    reward ? ["Reward, first to last quarter", `${number(reward.first)} → ${number(reward.last)}`] : ["Mean reward", mean],
    reward && ["Best step", `${count(reward.best_step)} (reward ${number(reward.best)})`],
    ...evaluations.map((found) => [nameEvaluation(found), found.map(describeEvaluation).join(" → ")]),
    ["Sessions", count(run.num_sessions)],
    ["Tasks", count(choices.num_tasks)],
    failure && ["Failed most often", `${failure[0]} (${count(failure[1])})`, { ended: failure[0] }],
  ].filter(Boolean);
  replace(root, facts.map(([name, value, filter]) =>
    h("div", {}, h("dt", {}, name), h("dd", { title: value }, filter ? h("a", { href: addressOf(run, filter) }, value) : value))));
}

function describeLessons({ steps_that_taught_nothing: steps, taught_nothing: why, try: advice }) {
  return `${plural(steps, "step")} taught nothing, the latest because: ${why}. Try: ${advice}.`;
}

function nameEvaluation([{ set }, last]) {
  return `Evaluation${set ? ` of ${set}` : ""}${last ? ", first to last" : ""}`;
}

function describeEvaluation(evaluation) {
  const { step, reward, graded, solved, pass_rate: rate, pass_rate_low: low, pass_rate_high: high } = evaluation;
  if (graded === undefined || rate === undefined) return `${number(reward)} (step ${step})`;
  return `${count(solved)} of ${count(graded)} solved (${percent(rate)}, ${percent(low)} to ${percent(high)}; step ${step})`;
}

function addressOf(run, filter) {
  return `#/sessions?${new URLSearchParams({ ...(run.number ? { run: run.number } : {}), ...filter })}`;
}

function drawTasks(root, found, run) {
  const at = (filter) => addressOf(run, filter);
  replace(
    root,
    found.tasks.length ? buildTaskTable(found, at) : null,
    found.train ? buildTaskMap("Tasks by step", "Mean reward of a task's sessions in a step; a cell leads to them.", found.train, (filter) => at({ ...filter })) : null,
    found.eval ? buildTaskMap("Evaluated tasks by step", "The same of evaluations, after the step.", found.eval, (filter) => at({ ...filter, use: "evaluation" })) : null,
  );
}

function drawEnds(root, run) {
  const { ended, stage, examples, unreadable } = run.choices;
  const total = Math.max(1, run.num_sessions);
  const others = Object.entries(stage).filter(([name]) => name !== "done");
  const line = (filter, name, times, example) =>
    h("li", {},
      h("a", { href: addressOf(run, filter) },
        h("span", { class: "label", title: name }, words(name)),
        h("span", { class: "bar" }, h("i", { style: { width: `${(100 * times) / total}%` } })),
        h("span", { class: "value" }, count(times)),
        h("span", { class: "example", title: example }, example ?? "")));
  replace(
    root,
    h("section", { class: "card ends" },
      h("h2", {}, "How sessions ended"),
      run.num_sessions
        ? h("ul", { class: "bars" },
          Object.entries(ended).map(([name, times]) => line({ ended: name }, name, times, examples[name])),
          others.map(([name, times]) => line({ stage: name }, name, times, name === "unreadable" ? unreadable[0]?.[0] : null)))
        : h("p", { class: "hint" }, "No session has ended."),
      run.bad_row_lines ? h("p", { class: "hint" }, `${plural(run.bad_row_lines, "line")} of rows/ could not be read.`) : null),
  );
}

function drawSettings(root, run) {
  const open = root.open;
  replace(
    root,
    h("summary", {}, "Settings, versions and hardware"),
    h("table", { class: "plain" }, h("tbody", {}, Object.entries(run.settings).map(([name, value]) =>
      h("tr", {}, h("th", { scope: "row" }, words(name)), h("td", {}, value === null ? "–" : String(value)))))),
  );
  root.open = open;
}
