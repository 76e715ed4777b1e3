// The forks of a session: why each trajectory begins, at its first different token, and the tokens that were not trained.

import { ask, h, notice, replace } from "./dom.js";
import { count, plural, words } from "./format.js";
import { REASONS } from "./reasons.js";

export async function showForks(root, page) {
  const list = h("div", { class: "forks", tabindex: "0" });
  replace(root, list);
  const draw = (meta) => {
    const tracks = meta.tracks.map((track, number) => ({ track, number })).filter(({ track }) => track.fork);
    const trained = tracks.filter(({ track }) => track.name.startsWith("trajectory"));
    const others = tracks.filter(({ track }) => !track.name.startsWith("trajectory"));
    replace(
      list,
      h("section", { class: "card" }, h("h2", {}, "State of the sampled tokens"), buildDrops(meta)),
      h("h2", {}, trained.length ? plural(trained.length, "fork") : "No forks"),
      trained.length ? null : h("p", { class: "hint" }, "Every trained call continues the one before, token for token: the session is one trajectory."),
      trained.map(({ track, number }) => buildFork(page, meta, track, number)),
      others.length ? h("h2", {}, "Calls outside of every trajectory") : null,
      others.map(({ track, number }) => buildFork(page, meta, track, number)),
    );
    const chosen = page.params.track;
    if (chosen) list.querySelector(`[data-track="${Number(chosen)}"]`)?.scrollIntoView({ block: "start" });
  };
  draw(page.meta);
  return { grow: draw, navigate() { draw(page.meta); } };
}

function buildDrops(meta) {
  const entries = Object.entries(meta.tokens);
  const total = entries.reduce((sum, [, times]) => sum + times, 0);
  if (!total) return h("p", { class: "hint" }, "No token was sampled.");
  const explain = (state) => {
    if (state === "trained") return "in the gradient of its step";
    if (state === "trainable") return meta.has_rows ? "its step has not been made yet" : "the run has no rows on disk that say whether it was trained";
    return REASONS[state] ?? "";
  };
  return h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, ["", "Tokens", "Share", "What it means"].map((title, index) => h("th", { class: index === 1 || index === 2 ? "right" : "", scope: "col" }, title)))),
    h("tbody", {}, entries.map(([state, times]) => h("tr", {},
      h("th", { scope: "row" }, h("i", { class: `swatch state-${state}` }), words(state)),
      h("td", { class: "right" }, count(times)),
      h("td", { class: "right" }, `${((100 * times) / total).toFixed(times === total ? 0 : 1)} %`),
      h("td", {}, explain(state))))));
}

function buildFork(page, meta, track, number) {
  const fork = track.fork;
  const other = meta.tracks[fork.other_track];
  const body = h("div", { class: "excerpts" }, h("p", { class: "hint" }, "Loading the texts …"));
  const element = h("section", { class: "card fork-card", data: { track: number } },
    h("h3", {}, `${track.name}: `, h("span", { class: "reason" }, fork.reason)),
    h("p", {}, fork.explanation),
    h("p", { class: "hint" },
      "Begins with ", h("a", { href: page.address({ view: "conversation", call: fork.call }) }, `call ${fork.call}`),
      `. Its prompt shares ${plural(fork.shared, "token")} with `,
      h("a", { href: page.address({ view: "tokens", track: fork.other_track, at: fork.shared }) }, other.name),
      ` up to call ${fork.other_call}, and first differs at token ${count(fork.shared)}. `,
      h("a", { href: page.address({ view: "tokens", track: number, at: fork.shared }) }, "Show it in the tokens")),
    body);
  ask("fork", { key: page.params.key, track: number }).then(
    (texts) => replace(body, buildSide(other.name, texts.shared, texts.other, "The other trajectory"), buildSide(track.name, texts.shared, texts.this, "This one")),
    (error) => replace(body, notice(error.message, "bad")),
  );
  return element;
}

function buildSide(name, shared, rest, title) {
  const spell = (part, first) => part.texts.map((text, index) => {
    const token = h("span", { class: `tk k${part.kinds[index]}${first && index === 0 ? " differs" : ""}` }, text);
    return text.includes("↵") ? [token, "\n"] : token;
  });
  return h("figure", {},
    h("figcaption", {}, h("b", {}, title), ` (${name})`),
    h("pre", { class: "text code" },
      h("span", { class: "shared" }, shared.first > 0 ? "… " : "", spell(shared, false)),
      rest.texts.length ? h("span", { class: "own" }, spell(rest, true)) : h("span", { class: "own end" }, "(ends here)"),
      rest.texts.length ? " …" : ""));
}
