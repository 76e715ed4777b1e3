// The page of a session: its result, then three views of the same calls.

import { ask, h, notice, replace } from "./dom.js";
import { count, number, seconds, signed, words } from "./format.js";
import { showConversation } from "./conversation.js";
import { showEnding } from "./ending.js";
import { showForks } from "./forks.js";
import { REASONS } from "./reasons.js";
import { buildPhases, PHASES } from "./sessions.js";
import { showTokens } from "./tokens.js";

const VIEWS = { conversation: ["Conversation", showConversation], tokens: ["Tokens", showTokens], forks: ["Forks and drops", showForks], ending: ["How it ended", showEnding] };

export async function showSession(root, params, run) {
  const page = new SessionPage(root, params);
  page.run = run;
  await page.load();
  page.version = run.sessions_version;
  return page;
}

class SessionPage {
  constructor(root, params) {
    this.root = root;
    this.params = params;
    this.head = h("header", { class: "session-head" });
    this.tabs = h("nav", { class: "tabs", "aria-label": "Views of this session" });
    this.body = h("div", { class: "view" });
    root.classList.add("full");
    replace(root, this.head, this.tabs, this.body);
  }

  close() {
    this.view?.close?.();
    this.root.classList.remove("full");
  }

  async load() {
    this.meta = await ask("session", { key: this.params.key });
    this.drawHead();
    await this.showView();
  }

  async update(run) {
    if (run.sessions_version === this.version) return;
    this.version = run.sessions_version;
    const meta = await ask("session", { key: this.params.key });
    // a session that is done is trained later: its advantage and the trainer's figures come then
    const hasGrown = meta.size !== this.meta.size || meta.row.stage !== this.meta.row.stage;
    const isDecided = ["has_rows", "num_rows"].some((name) => meta[name] !== this.meta[name])
      || ["advantage", "use"].some((name) => meta.row[name] !== this.meta.row[name]);
    if (!hasGrown && !isDecided) return;
    this.meta = meta;
    this.drawHead();
    if (isDecided && ["tokens", "forks"].includes(this.params.view)) await this.showView();
    else if (hasGrown) this.view?.grow?.(meta);
  }

  async navigate(params) {
    const view = this.params.view;
    this.params = params;
    if ((view ?? "conversation") === (params.view ?? "conversation") && this.view?.navigate) this.view.navigate(params);
    else await this.showView();
    this.drawTabs();
  }

  address(changes) {
    return `#/session?${new URLSearchParams({ ...this.params, ...changes })}`;
  }

  async showView() {
    this.view?.close?.();
    this.drawTabs();
    const name = this.params.view in VIEWS ? this.params.view : "conversation";
    replace(this.body);
    try {
      this.view = await VIEWS[name][1](this.body, this);
    } catch (error) {
      replace(this.body, notice(error.message, "bad"));
    }
  }

  drawTabs() {
    const shown = this.params.view in VIEWS ? this.params.view : "conversation";
    const forks = this.meta.tracks.filter((track) => track.fork && track.name.startsWith("trajectory")).length;
    replace(this.tabs, Object.entries(VIEWS).map(([name, [title]]) =>
      h("a", { href: this.address({ view: name }), "aria-current": name === shown ? "page" : null }, title,
        name === "forks" && forks ? h("span", { class: "badge" }, forks) : null)));
  }

  drawHead() {
    const row = this.meta.row;
    const group = this.meta.group;
    const at = group.findIndex((item) => item.key === row.key);
    const neighbour = (offset, text, title) => {
      const other = group[at + offset];
      return other
        ? h("a", { class: "button", href: `#/session?${new URLSearchParams({ key: other.key, ...(this.params.view ? { view: this.params.view } : {}) })}`, title }, text)
        : h("span", { class: "button off", "aria-disabled": "true" }, text);
    };
    const facts = [
      ["Task", row.task],
      row.agent && ["Agent", row.agent],
      row.batch && ["Batch", `${words(row.batch).replace(/ 0*(\d)/, " $1")}${nameUse(row)}`],
      ["Reward", row.reward === null ? (row.stage === "done" ? "none" : "–") : number(row.reward)],
      ["Advantage", row.advantage === null ? "–" : signed(row.advantage)],
      ["Calls", count(this.meta.calls.length)],
      ["Sampled", `${count(this.meta.calls.reduce((sum, call) => sum + call.sampled_tokens, 0))} tokens`],
      ["Trajectories", count(this.meta.tracks.filter((track) => track.name.startsWith("trajectory")).length)],
      ["Ended", row.ended ?? row.stage],
      ["Time", row.seconds === null ? "–" : seconds(row.seconds)],
    ].filter(Boolean);
    replace(
      this.head,
      h("div", { class: "title" },
        h("h1", {}, row.rollout || row.key),
        group.length > 1 ? h("span", { class: "siblings" }, `${at + 1} of ${group.length} in its group`, neighbour(-1, "‹", "Previous session of the group"), neighbour(1, "›", "Next session of the group"),
          h("a", { class: "button", href: `#/sessions?${new URLSearchParams({ ...(this.run.number ? { run: this.run.number } : {}), group: row.group, attempt: row.attempt })}` }, "Group")) : null,
        h("a", { class: "button", href: `#/compare?${new URLSearchParams({ task: row.task, left: row.key })}`, title: "Side by side with another session of this task" }, "Compare"),
        row.seconds === null ? null : h("span", { class: "time" }, buildPhases(row.phases), PHASES.filter((phase) => row.phases[phase] > 0.0005).map((phase) =>
          h("span", { class: "entry" }, h("i", { class: `swatch phase-${phase}` }), phase, h("b", {}, seconds(row.phases[phase])))))),
      h("dl", { class: "facts tight" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { title: value }, value)))),
      row.error ? notice(row.error, "bad") : null,
      this.meta.dropped ? notice(`Not trained (${words(this.meta.dropped)}): ${REASONS[this.meta.dropped] ?? ""}.`) : null,
    );
  }
}

/** The trainer's use of the session, after the name of its batch. */
function nameUse(row) {
  if (row.use === null || row.step === null) return "";
  if (row.use === "evaluation") return `, after step ${row.step}`;
  if (row.use === "trained") return `, trained in step ${row.step}`;
  return row.use === "to train" ? `, for step ${row.step}` : `, not trained in step ${row.step}`;
}
