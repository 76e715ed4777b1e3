// The table of sessions. The server filters and sorts; the page holds only the rows that are on its screen.

import { ask, debounce, h, notice, replace } from "./dom.js";
import { count, number, plural, seconds, signed, words } from "./format.js";

const ROW = 32;
const PAGE = 100;
const KEPT_PAGES = 20;
const SPARE = 8;

const COLUMNS = [
  { name: "step", title: "Step", align: "right", width: "2.6rem", hint: "Optimizer step that trained it" },
  { name: "batch", title: "Batch", width: "5.2rem" },
  { name: "rollout", title: "Session", width: "minmax(9.5rem, 1fr)" },
  { name: "task", title: "Task", width: "minmax(7rem, 2.2fr)" },
  { name: "agent", title: "Agent", width: "6rem" },
  { name: "stage", title: "Stage", width: "5rem" },
  { name: "reward", title: "Reward", align: "right", width: "3.6rem" },
  { name: "advantage", title: "Adv.", align: "right", width: "4rem", hint: "Advantage" },
  { name: "calls", title: "Calls", align: "right", width: "2.6rem" },
  { name: "tokens", title: "Tokens", align: "right", width: "3.6rem", hint: "Sampled tokens" },
  { name: "trajectories", title: "Traj.", align: "right", width: "2.6rem", hint: "Trajectories; more than 1 means forks" },
  { name: "seconds", title: "Time", align: "right", width: "7.5rem", hint: "Queue, prepare, agent, held, grade" },
  { name: "ended", title: "Ended", width: "minmax(8rem, 1.2fr)", hint: "How the session ended" },
  { name: "error", title: "Reason", width: "minmax(5rem, 1fr)", hint: "The error, or what the agent printed last" },
];
export const PHASES = ["queue", "prepare", "agent", "held", "grade"];

export async function showSessions(root, params, run) {
  const table = new Table(root, params, run);
  await table.load();
  return table;
}

class Table {
  constructor(root, params, run) {
    this.params = params;
    this.run = run;
    this.pages = new Map();
    this.total = 0;
    this.filters = h("form", { class: "filters", on: { submit: (event) => event.preventDefault() } });
    this.summary = h("p", { class: "summary", role: "status" });
    this.columns = COLUMNS.filter((column) => (column.name !== "agent" || run.agent) && (!["step", "batch", "advantage"].includes(column.name) || hasBatches(run)));
    this.head = h("div", { class: "row head", role: "row" });
    this.body = h("div", { class: "rows", role: "rowgroup" });
    this.scroller = h("div", { class: "table", role: "table", "aria-label": "Sessions", tabindex: "0" }, this.head, this.body);
    this.scroller.style.setProperty("--columns", this.columns.map((column) => column.width).join(" "));
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.scroller.addEventListener("keydown", (event) => this.onKey(event));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.scroller);
    replace(root, h("h1", { class: "sr" }, "Sessions"), this.filters, this.summary, this.scroller);
    root.classList.add("full");
    this.root = root;
    this.drawFilters();
    this.drawHead();
  }

  close() {
    this.observer.disconnect();
    this.root.classList.remove("full");
  }

  async update(run) {
    if (run.sessions_version === this.run.sessions_version) return;
    this.run = run;
    this.updateChoices();
    const top = Math.floor(this.scroller.scrollTop / ROW / PAGE);
    this.pages.clear();
    await this.fetchPage(top);
    this.draw();
  }

  async navigate(params) {
    this.params = params;
    this.drawFilters();
    this.drawHead();
    await this.load();
  }

  async load() {
    this.pages.clear();
    this.scroller.scrollTop = 0;
    await this.fetchPage(0);
    this.draw();
  }

  set(changes) {
    const params = Object.fromEntries(Object.entries({ ...this.params, ...changes }).filter(([, value]) => value));
    location.hash = `#/sessions?${new URLSearchParams(params)}`;
  }

  drawFilters() {
    if (this.filters.contains(document.activeElement)) return; // being typed into
    const choices = this.run.choices;
    this.selects = {};
    const select = (name, title, all) => {
      const element = h("select", { on: { change: (event) => this.set({ [name]: event.target.value }) } });
      this.selects[name] = { element, all };
      return h("label", {}, title, element);
    };
    const input = (name, title, placeholder) => {
      const set = debounce(250, (value) => this.set({ [name]: value }));
      return h("label", {}, title, h("input", { type: "search", value: this.params[name] ?? "", placeholder, on: { input: (event) => set(event.target.value.trim()) } }));
    };
    replace(
      this.filters,
      input("search", "Search", "task, session or error"),
      hasBatches(this.run) ? input("step", "Step", "3, 3-7") : null,
      hasBatches(this.run) ? select("batch", "Batch", "any") : null,
      input("reward", "Reward", "1, >0.5, none"),
      select("stage", "Stage", "any"),
      select("ended", "Ended", "any"),
      ["task", "use", "group"].filter((name) => this.params[name]).map((name) => h("span", { class: "chip" }, `${name} ${this.params[name]}`)),
      h("button", { type: "button", on: { click: () => { location.hash = `#/sessions${this.run.number ? `?run=${this.run.number}` : ""}`; } } }, "Clear"),
    );
    this.updateChoices(choices);
  }

  updateChoices() {
    for (const [name, { element, all }] of Object.entries(this.selects)) {
      const chosen = this.params[name] ?? "";
      const values = Object.entries(this.run.choices[name]).filter(([value]) => value);
      replace(element, h("option", { value: "" }, all), values.map(([value, times]) =>
        h("option", { value, selected: value === chosen }, `${words(value)} (${count(times)})`)));
      if (chosen && !values.some(([value]) => value === chosen)) element.append(h("option", { value: chosen, selected: true }, chosen));
    }
  }

  drawHead() {
    replace(this.head, this.columns.map((column) => {
      const isSorted = this.params.sort === column.name;
      const isDown = this.params.down === "1";
      const next = isSorted ? (isDown ? { sort: "", down: "" } : { sort: column.name, down: "1" }) : { sort: column.name, down: "" };
      return h("div", { role: "columnheader", class: column.align ?? "", "aria-sort": isSorted ? (isDown ? "descending" : "ascending") : "none" },
        h("button", { type: "button", title: column.hint ?? `Sort by ${column.title}`, on: { click: () => this.set(next) } },
          column.title, isSorted ? (isDown ? " ▼" : " ▲") : ""));
    }));
  }

  async fetchPage(page) {
    if (this.pages.has(page)) return;
    this.pages.set(page, null);
    try {
      const answer = await ask("sessions", { ...this.params, offset: page * PAGE, limit: PAGE });
      this.pages.set(page, answer.rows);
      this.total = answer.matched;
      const mean = answer.mean_reward === null ? "" : `, mean reward ${number(answer.mean_reward)}`;
      const all = answer.matched === answer.total ? "" : ` of ${count(answer.total)}`;
      replace(this.summary, `${count(answer.matched)}${all} ${answer.total === 1 ? "session" : "sessions"}${mean}`);
      if (this.pages.size > KEPT_PAGES) this.pages.delete(this.pages.keys().next().value);
    } catch (error) {
      this.pages.delete(page);
      this.total = 0;
      replace(this.summary, notice(error.message, "bad"));
    }
  }

  draw() {
    const top = this.scroller.scrollTop;
    const first = Math.max(0, Math.floor(top / ROW) - SPARE);
    const last = Math.min(this.total, Math.ceil((top + this.scroller.clientHeight) / ROW) + SPARE);
    const focused = document.activeElement?.dataset?.row;
    this.body.style.height = `${this.total * ROW}px`;
    const rows = [];
    for (let index = first; index < last; index += 1) {
      const page = Math.floor(index / PAGE);
      const row = this.pages.get(page)?.[index % PAGE];
      if (row === undefined && !this.pages.has(page)) this.fetchPage(page).then(() => this.draw());
      rows.push(this.buildRow(index, row));
    }
    replace(this.body, rows);
    if (focused !== undefined) this.body.querySelector(`[data-row="${focused}"]`)?.focus({ preventScroll: true });
  }

  buildRow(index, row) {
    const place = { top: `${index * ROW}px` };
    if (!row) return h("div", { class: "row waiting", role: "row", style: place });
    return h("a", {
      class: "row", role: "row", href: `#/session?${new URLSearchParams({ key: row.key })}`, style: place, data: { row: index },
      "aria-rowindex": index + 1,
    }, this.columns.map((column) => h("div", { role: "cell", class: `${column.align ?? ""} ${column.name}`, title: buildTitle(column.name, row) }, buildCell(column.name, row))));
  }

  onKey(event) {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const focused = document.activeElement?.dataset?.row;
    if (!move || focused === undefined) return;
    event.preventDefault();
    const next = Math.min(this.total - 1, Math.max(0, Number(focused) + move));
    const top = next * ROW;
    if (top < this.scroller.scrollTop) this.scroller.scrollTop = top;
    if (top + 2 * ROW > this.scroller.scrollTop + this.scroller.clientHeight) this.scroller.scrollTop = top + 3 * ROW - this.scroller.clientHeight;
    this.draw();
    this.body.querySelector(`[data-row="${next}"]`)?.focus({ preventScroll: true });
  }
}

function hasBatches(run) {
  return run.has_curves || Object.keys(run.choices.batch).some(Boolean);
}

function buildCell(name, row) {
  switch (name) {
    case "batch": return words(row.batch).replace(/ 0*(\d)/, " $1");
    case "stage": return h("span", { class: `stage ${row.stage.replace(" ", "-")}` }, row.stage);
    case "reward": return row.reward === null ? h("span", { class: "none" }, row.stage === "done" ? "none" : "") : number(row.reward);
    case "advantage": return row.advantage === null ? "" : row.left_out ? h("span", { class: "none" }, "left out") : signed(row.advantage);
    case "calls": case "tokens": case "trajectories": case "step": return row[name] === null ? "" : count(row[name]);
    case "seconds": return row.seconds === null ? "" : [buildPhases(row.phases), h("span", { class: "total" }, seconds(row.seconds))];
    default: return row[name] ?? "";
  }
}

function buildTitle(name, row) {
  if (name === "seconds" && row.seconds !== null) return PHASES.filter((phase) => phase in row.phases).map((phase) => `${phase} ${seconds(row.phases[phase])}`).join(", ");
  if (name === "trajectories" && row.trajectories !== null) {
    const dropped = Object.entries(row.dropped).map(([reason, times]) => `${plural(times, "token")} dropped as ${reason}`);
    return [plural(Math.max(0, row.trajectories - 1), "fork"), ...dropped].join(", ");
  }
  if (name === "advantage" && row.left_out) return `left out: ${words(row.left_out)}`;
  if (["task", "error", "rollout", "ended"].includes(name)) return row[name] ?? "";
  return null;
}

export function buildPhases(phases) {
  const total = Object.values(phases).reduce((sum, value) => sum + value, 0) || 1;
  return h("span", { class: "phases", "aria-hidden": "true" }, PHASES.filter((phase) => phases[phase] > 0).map((phase) =>
    h("i", { class: `phase-${phase}`, style: { width: `${(100 * phases[phase]) / total}%` } })));
}
