// How a session ended: the agent's exit and its last output, what the grader and its tests said, and what was changed.

import { ask, h, notice, replace } from "./dom.js";
import { plural } from "./format.js";

export async function showEnding(root, page) {
  const ending = h("div", { class: "ending", tabindex: "0", "aria-label": "How it ended" });
  replace(root, ending);
  const draw = async () => drawEnding(ending, await ask("ending", { key: page.params.key }));
  await draw();
  return { grow: draw };
}

function drawEnding(root, { agent, grading, changes }) {
  if (!agent && !grading && changes === null) {
    replace(root, notice("How it ended is not on record: the session goes on, its agent was never started, or an earlier version recorded it."));
    return;
  }
  replace(
    root,
    agent ? h("section", { class: "card" }, h("h2", {}, `Agent: ${agent.ended}`), buildOutput(agent.output, "It printed nothing.")) : null,
    grading ? buildGrading(grading) : null,
    changes === null ? null : h("section", { class: "card" }, h("h2", {}, "Changes of the work folder"), changes ? buildDiff(changes) : h("p", { class: "hint" }, "None.")),
  );
}

function buildGrading(grading) {
  const counts = [["passed", grading.num_passed], ["failed", grading.num_failed], ["not found", grading.num_missing]]
    .filter(([name, times]) => times || name === "passed").map(([name, times]) => `${times} ${name}`).join(", ");
  const list = (title, names, total) => (names.length
    ? [h("h3", {}, title), h("ul", { class: "tests" }, names.map((name) => h("li", {}, name))),
      names.length < total ? h("p", { class: "hint" }, `and ${plural(total - names.length, "more test", "more tests")}`) : null]
    : null);
  return h("section", { class: "card" },
    h("h2", {}, grading.num_tests ? `Grader: ${plural(grading.num_tests, "test")}, ${counts}` : "Grader"),
    list("Failed", grading.failed, grading.num_failed),
    list("Not found", grading.missing, grading.num_missing),
    buildOutput(grading.output, "It printed nothing."));
}

function buildOutput(text, empty) {
  return text ? h("pre", { class: "text code" }, text) : h("p", { class: "hint" }, empty);
}

/** A unified diff, line by line; lines that begin with # are the recorder's. */
function buildDiff(text) {
  const kindOf = (line) => {
    if (/^(diff |index |--- |\+\+\+ )/.test(line)) return "file";
    return { "@": "hunk", "+": "added", "-": "removed", "#": "note" }[line[0]] ?? "";
  };
  return h("pre", { class: "text code diff" }, text.split("\n").map((line) => h("span", { class: kindOf(line) }, `${line}\n`)));
}
