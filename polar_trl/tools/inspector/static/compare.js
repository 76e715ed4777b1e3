// Two sessions of one task side by side: of two runs, or of two steps of one. Each side is chosen from the task's sessions.

import { ask, h, notice, replace } from "./dom.js";
import { count, number, seconds } from "./format.js";
import { showConversation } from "./conversation.js";
import { showEnding } from "./ending.js";

const MOST = 500;
const SIDES = ["left", "right"];
const VIEWS = { conversation: showConversation, ending: showEnding };

export async function showCompare(root, params, run) {
  const page = new Compare(root, run);
  await page.navigate(params);
  return page;
}

class Compare {
  constructor(root, run) {
    this.root = root;
    this.runs = run.runs;
    this.shown = {};
    this.bar = h("div", { class: "toolbar" });
    this.sides = { left: new Side(), right: new Side() };
    root.classList.add("full");
    replace(root, h("h1", { class: "sr" }, "Compare"), this.bar, h("div", { class: "pair" }, SIDES.map((side) => this.sides[side].element)));
  }

  close() {
    SIDES.forEach((side) => this.sides[side].close());
    this.root.classList.remove("full");
  }

  async navigate(params) {
    this.params = params;
    this.tasks ??= await this.listTasks();
    const task = params.task ?? this.tasks[0];
    if (task === undefined) {
      replace(this.bar, notice("There is no session with a task to compare."));
      return;
    }
    const sessions = await this.listSessions(task);
    const chosen = {
      left: params.left ?? sessions.find((row) => row.key !== params.right)?.key,
      right: params.right ?? sessions.findLast((row) => row.key !== params.left)?.key,
    };
    this.drawBar(task);
    await Promise.all(SIDES.map((side) => this.sides[side].show(chosen[side], sessions, params.view, (key) => this.set({ ...chosen, task, [side]: key }))));
  }

  set(changes) {
    location.hash = `#/compare?${new URLSearchParams(Object.entries({ view: this.params.view, ...changes }).filter(([, value]) => value))}`;
  }

  /** Tasks that all runs have sessions of, or else all tasks of any. */
  async listTasks() {
    const names = await Promise.all(this.runs.map((_, run) => ask("task_names", { run })));
    const shared = names[0].filter((name) => names.every((others) => others.includes(name)));
    return shared.length ? shared : [...new Set(names.flat())];
  }

  /** The task's sessions, run by run, each run's from its first step to its last. */
  async listSessions(task) {
    const found = await Promise.all(this.runs.map((_, run) => ask("sessions", { run, task, sort: "step", limit: MOST })));
    return found.flatMap(({ rows }, run) => rows.map((row) => ({ ...row, run: this.runs.length > 1 ? this.runs[run] : null })));
  }

  drawBar(task) {
    const select = h("select", { on: { change: (event) => this.set({ task: event.target.value }) } },
      this.tasks.map((name) => h("option", { value: name, selected: name === task }, name)));
    const view = this.params.view in VIEWS ? this.params.view : "conversation";
    const views = h("select", { on: { change: (event) => this.set({ ...this.params, view: event.target.value }) } },
      h("option", { value: "conversation", selected: view === "conversation" }, "conversation"),
      h("option", { value: "ending", selected: view === "ending" }, "how it ended"));
    replace(this.bar, h("label", {}, "Task", select), h("label", {}, "Show", views));
  }
}

class Side {
  constructor() {
    this.choice = h("select", { "aria-label": "Session" });
    this.head = h("p", { class: "summary" });
    this.body = h("div", { class: "view" });
    this.element = h("section", { class: "side" }, this.choice, this.head, this.body);
  }

  close() {
    this.view?.close?.();
    this.view = null;
  }

  async show(key, sessions, view, choose) {
    this.choice.onchange = () => choose(this.choice.value);
    replace(this.choice, sessions.map((row) => h("option", { value: row.key, selected: row.key === key }, describe(row))));
    const name = view in VIEWS ? view : "conversation";
    if (this.shown === `${name} ${key}`) return;
    this.close();
    this.shown = `${name} ${key}`;
    replace(this.head);
    replace(this.body);
    if (key === undefined) {
      replace(this.body, notice("The task has no other session."));
      return;
    }
    try {
      const meta = await ask("session", { key });
      const row = meta.row;
      const address = (changes) => `#/session?${new URLSearchParams({ key, ...changes })}`;
      replace(this.head, h("a", { href: address({}) }, row.rollout), ` · ${row.ended ?? row.stage} · reward ${number(row.reward)} · ${count(meta.calls.length)} calls · ${seconds(row.seconds)}`);
      this.view = await VIEWS[name](this.body, { params: { key }, meta, address });
    } catch (error) {
      replace(this.body, notice(error.message, "bad"));
    }
  }
}

function describe(row) {
  return [row.run, row.step === null ? row.batch || null : `step ${row.step}${row.use === "evaluation" ? " (evaluation)" : ""}`, `reward ${row.reward === null ? "none" : number(row.reward)}`, row.rollout].filter(Boolean).join(" · ");
}
