// Colour modes of tokens, with their legends.

import { h } from "./dom.js";
import { number, signed, words } from "./format.js";
import { buildScale, niceCeil, palette, stateColors } from "./scales.js";

export const MODES = [
  ["state", "Trained"],
  ["engine", "Engine logprob"],
  ["gap", "Gap"],
  ["size", "|Gap|"],
  ["version", "Policy version"],
  ["advantage", "Advantage"],
];
const LEAST_LOGPROB = -6;

/** Each mode's {color(token), legend()}; a token is {state, engine, trainer, version}. */
export function buildModes(meta, track) {
  const { sequential, diverging } = palette();
  const states = stateColors();
  // the 99th percentile: one token far off would make all others look alike
  const limit = niceCeil(track.gap?.p99 ?? 1);
  const [oldest, newest] = versionsOf(meta);
  const advantages = meta.tracks.map((other) => Math.abs(other.advantage ?? 0));
  const largest = niceCeil(Math.max(...advantages, 2)); // in units of a group's deviation, where rewards are scaled
  const engine = buildScale(sequential, 0, LEAST_LOGPROB);
  const gap = buildScale(diverging, -limit, limit);
  const size = buildScale(sequential, 0, limit);
  const version = buildScale(sequential.slice(1), oldest, newest);
  const advantage = buildScale(diverging, -largest, largest);
  const difference = (token) => (token.engine === null || token.trainer === null ? null : token.trainer - token.engine);
  const noGap = "no trainer log-probabilities on record";
  return {
    state: {
      color: (token) => states[token.state] ?? null,
      legend: () => [entry("context (not sampled here)", null), Object.keys(track.tokens).map((state) => entry(words(state), states[state]))],
    },
    engine: {
      color: (token) => (token.state === "context" ? null : engine.color(token.engine)),
      legend: () => ramp(engine, ["0 (certain)", `≤ ${number(LEAST_LOGPROB)} nats`]),
    },
    gap: {
      color: (token) => gap.color(difference(token)),
      legend: () => (track.gap ? ramp(gap, [`trainer lower, ≤ −${number(limit)}`, `trainer higher, ≥ ${number(limit)} nats`]) : noGap),
    },
    size: {
      color: (token) => { const value = difference(token); return value === null ? null : size.color(Math.abs(value)); },
      legend: () => (track.gap ? ramp(size, ["0", `≥ ${number(limit)} nats`]) : noGap),
    },
    version: {
      color: (token) => (token.version < 0 ? null : version.color(token.version)),
      legend: () => (oldest === newest ? entry(`version ${oldest}`, version.color(oldest)) : ramp(version, [`version ${oldest}`, `${newest}`])),
    },
    advantage: {
      color: (token) => (token.state === "trained" || token.state === "trainable" ? advantage.color(track.advantage) : null),
      legend: () => (track.advantage === null ? "no advantage on record" : [ramp(advantage, [signed(-largest), signed(largest)]), h("span", { class: "entry" }, "this rollout", h("b", {}, signed(track.advantage)))]),
    },
  };
}

function versionsOf(meta) {
  const versions = meta.tracks.flatMap((track) => track.versions ?? []);
  return versions.length ? [Math.min(...versions), Math.max(...versions)] : [0, 0];
}

function entry(text, color) {
  return h("span", { class: "entry" }, h("i", { class: "swatch", style: color ? { "background-color": color.back } : {} }), text);
}

function ramp(scale, [low, high]) {
  return h("span", { class: "ramp" }, low, h("i", { style: { background: `linear-gradient(to right, ${scale.stops.join(", ")})` } }), high);
}
