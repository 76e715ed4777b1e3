// The figures of the token that is pointed at, or of the whole trajectory.

import { h, replace } from "./dom.js";
import { count, number, signed, words } from "./format.js";
import { REASONS } from "./reasons.js";

/** `found`: {data, index} of the token in a block of lines; null shows the trajectory's figures. */
export function drawDetail(root, meta, track, position, found) {
  if (!found) {
    replace(root, buildFacts(listTrackFacts(track)), h("span", { class: "hint" }, "Point at a token, or click one and use the arrow keys."));
    return;
  }
  const state = meta.states[found.data.states[found.index]];
  replace(root, buildFacts(listTokenFacts(track, position, found, state)), REASONS[state] ? h("span", { class: "hint" }, REASONS[state]) : null);
}

function listTrackFacts(track) {
  const gap = track.gap;
  return [
    ["Tokens", count(track.num_tokens)],
    ...Object.entries(track.tokens).map(([state, times]) => [words(state), count(times)]),
    ["Mean engine logprob", number(track.engine_mean)],
    ["Gap: mean", gap ? number(gap.mean) : "–"],
    ["99th percentile", gap ? number(gap.p99) : "–"],
    ["largest", gap ? number(gap.max) : "–"],
  ];
}

function listTokenFacts(track, position, { data, index }, state) {
  const [engine, trainer] = [data.engine[index], data.trainer[index]];
  const span = track.spans.findIndex(([start, end]) => position >= start && position < end);
  return [
    ["Token", h("span", { class: `tk k${data.kinds[index]}` }, data.texts[index])],
    ["Id", data.ids[index]],
    ["Position", count(position)],
    ["State", `${words(state)}${span >= 0 ? `, call ${track.calls[span]}` : ""}`],
    ["Engine logprob", engine === null ? "–" : `${number(engine, 4)} (p = ${number(Math.exp(engine), 3)})`],
    ["Trainer logprob", trainer === null ? "–" : number(trainer, 4)],
    ["Gap", engine === null || trainer === null ? "–" : signed(trainer - engine, 3)],
    ["Policy version", data.versions[index] < 0 ? "–" : data.versions[index]],
    ["Advantage", data.states[index] && track.advantage !== null ? signed(track.advantage) : "–"],
  ];
}

function buildFacts(facts) {
  return facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)));
}
