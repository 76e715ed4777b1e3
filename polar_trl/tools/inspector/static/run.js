// The page of a run: its state in figures, its curves, and how its sessions ended.

import { ask, h, notice, replace } from "./dom.js";
import { ChartGrid } from "./charts.js";
import { count, number, plural, words } from "./format.js";

export async function showRun(root, params, first) {
  const facts = h("dl", { class: "facts" });
  const note = h("div");
  const chartRoot = h("div", { class: "charts" });
  const ends = h("div", { class: "columns" });
  replace(root, h("h1", { class: "sr" }, "Run"), facts, note, chartRoot, h("h2", {}, "Sessions"), ends);
  const grid = new ChartGrid(chartRoot);
  let seen = null;

  async function update(run) {
    const version = `${run.curves_version}/${run.sessions_version}`;
    if (version === seen) return;
    seen = version;
    drawFacts(facts, run);
    drawEnds(ends, run);
    const { charts } = await ask("curves");
    grid.show(charts);
    const empty = run.has_curves
      ? "No step has been logged yet. Curves appear after the first one."
      : "This folder has sessions and no training steps, so there are no curves.";
    replace(
      note,
      run.settings_problem ? notice(`${run.settings_problem}: model, agent and number of steps are not known.`, "bad") : null,
      charts.length ? null : notice(empty),
    );
  }

  await update(first);
  return { update, navigate() {}, close: () => grid.close() };
}

function drawFacts(root, run) {
  const choices = run.choices;
  const facts = [
    ["Model", run.model ?? "–"],
    ["Agent", run.agent ?? "–"],
    ["Step", run.step === null ? "–" : `${count(run.step)}${run.max_steps ? ` of ${count(run.max_steps)}` : ""}`],
    ["Sessions", count(run.num_sessions)],
    ["Tasks", count(choices.num_tasks)],
    ["Mean reward", choices.mean_reward === null ? "–" : `${number(choices.mean_reward)} (${count(choices.num_rewards)} graded)`],
  ];
  replace(root, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { title: value }, value))));
}

function drawEnds(root, run) {
  const { stop_reason: reasons, stage: stages, errors } = run.choices;
  const total = Math.max(1, run.num_sessions);
  const list = (title, counts, name) =>
    h("section", { class: "card" },
      h("h3", {}, title),
      Object.keys(counts).length
        ? h("ul", { class: "bars" }, Object.entries(counts).map(([value, times]) =>
          h("li", {},
            h("a", { href: `#/sessions?${new URLSearchParams({ [name]: value })}` },
              h("span", { class: "label" }, words(value)),
              h("span", { class: "bar" }, h("i", { style: { width: `${(100 * times) / total}%` } })),
              h("span", { class: "value" }, count(times))))))
        : h("p", { class: "hint" }, "None yet."));
  replace(
    root,
    list("Stage", stages, "stage"),
    list("Why sessions ended", reasons, "stop_reason"),
    h("section", { class: "card" },
      h("h3", {}, "Most frequent errors"),
      errors.length
        ? h("ul", { class: "errors" }, errors.map(([text, times]) =>
          h("li", {}, h("a", { href: `#/sessions?${new URLSearchParams({ search: text.slice(0, 60) })}` },
            h("b", {}, `${count(times)}×`), " ", text))))
        : h("p", { class: "hint" }, "No session has an error."),
      run.bad_row_lines ? h("p", { class: "hint" }, `${plural(run.bad_row_lines, "line")} of rows/ could not be read.`) : null),
  );
}
