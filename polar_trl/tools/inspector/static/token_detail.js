// The figures of the token that is pointed at, or of the whole trajectory.

import { h, replace } from "./dom.js";
import { count, number, signed, words } from "./format.js";
import { REASONS } from "./reasons.js";

/** `found`: {data, index} of the token in a block of lines; null shows the trajectory's figures. */
export function drawDetail(root, meta, lane, position, found) {
  if (!found) {
    replace(root, buildFacts(listLaneFacts(lane)), h("span", { class: "hint" }, "Point at a token, or click one and use the arrow keys."));
    return;
  }
  const state = meta.states[found.data.states[found.index]];
  replace(root, buildFacts(listTokenFacts(lane, position, found, state)), REASONS[state] ? h("span", { class: "hint" }, REASONS[state]) : null);
}

function listLaneFacts(lane) {
  const gap = lane.gap;
  return [
    ["Tokens", count(lane.num_tokens)],
    ...Object.entries(lane.tokens).map(([state, times]) => [words(state), count(times)]),
    ["Mean engine logprob", number(lane.engine_mean)],
    ["Gap: mean", gap ? number(gap.mean) : "–"],
    ["99th percentile", gap ? number(gap.p99) : "–"],
    ["largest", gap ? number(gap.max) : "–"],
  ];
}

function listTokenFacts(lane, position, { data, index }, state) {
  const [engine, trainer] = [data.engine[index], data.trainer[index]];
  const span = lane.spans.findIndex(([start, end]) => position >= start && position < end);
  return [
    ["Token", h("span", { class: `tk k${data.kinds[index]}` }, data.texts[index])],
    ["Id", data.ids[index]],
    ["Position", count(position)],
    ["State", `${words(state)}${span >= 0 ? `, call ${lane.calls[span]}` : ""}`],
    ["Engine logprob", engine === null ? "–" : `${number(engine, 4)} (p = ${number(Math.exp(engine), 3)})`],
    ["Trainer logprob", trainer === null ? "–" : number(trainer, 4)],
    ["Gap", engine === null || trainer === null ? "–" : signed(trainer - engine, 3)],
    ["Policy version", data.versions[index] < 0 ? "–" : data.versions[index]],
    ["Advantage", data.states[index] && lane.advantage !== null ? signed(lane.advantage) : "–"],
  ];
}

function buildFacts(facts) {
  return facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}
