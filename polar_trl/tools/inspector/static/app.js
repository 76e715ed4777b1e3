// The address after # chooses a page; one question every two seconds tells every page what has changed.

import { ask, h, notice, replace } from "./dom.js";
import { plural } from "./format.js";
import { showCompare } from "./compare.js";
import { showRun } from "./run.js";
import { showSession } from "./session.js";
import { showSessions } from "./sessions.js";

const POLL_MS = 2000;
const main = document.getElementById("main");
const status = document.getElementById("status");
const nav = document.getElementById("nav");
let page = null;
let run = null;

/** Parse "#/sessions?task=a" as {name: "sessions", params: {task: "a"}}. */
function parseAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: path || "run", params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

const PAGES = { run: showRun, sessions: showSessions, session: showSession, compare: showCompare };
let shownAs = null;

/** The run that an address is about, from 0: a session's key begins with it, unless it is the first. */
function numberOf({ run: number, key }) {
  return Number(number ?? key?.match(/^(\d+)~/)?.[1] ?? 0);
}

async function askRun() {
  const number = numberOf(parseAddress().params);
  run = { ...(await ask("run", { run: number })), number };
  drawStatus();
}

async function route() {
  const { name, params } = parseAddress();
  if (name === "main") return; // the link that skips to the content
  // what a page changes in its own address does not build it again
  const identity = JSON.stringify([name, name === "session" ? params.key : null, numberOf(params)]);
  if (page && shownAs === identity && page.navigate) return page.navigate(params);
  page?.close?.();
  page = null;
  shownAs = identity;
  replace(main);
  window.scrollTo(0, 0);
  if (!run) return;
  try {
    if (run.number !== numberOf(params)) await askRun();
    drawNav(name);
    const built = await (PAGES[name] ?? showMissing)(main, params, run);
    if (shownAs === identity) page = built;
    else built?.close?.();
  } catch (error) {
    replace(main, notice(error.message, "bad"));
  }
}

function showMissing(root) {
  replace(root, notice("There is no such page.", "bad"));
}

function drawNav(name) {
  const link = (isHere, text, path, number) =>
    h("a", { href: `#/${path}${number ? `?run=${number}` : ""}`, "aria-current": isHere ? "page" : null }, text);
  replace(
    nav,
    run.runs.map((title, number) => {
      const [overview, sessions] = run.runs.length > 1 ? [title, `${title}: sessions`] : ["Run", "Sessions"];
      return [link(name === "run" && number === run.number, overview, "", number), link(name === "sessions" && number === run.number, sessions, "sessions", number)];
    }),
    link(name === "compare", "Compare", "compare", 0),
  );
}

function drawStatus() {
  const steps = run.step === null ? "" : `step ${run.step}${run.max_steps ? ` of ${run.max_steps}` : ""}`;
  replace(
    status,
    h("span", { class: "name", title: run.folder }, run.name),
    h("span", {}, [steps, plural(run.num_sessions, "session")].filter(Boolean).join(" · ")),
    h("span", { class: `live ${run.is_live ? "on" : ""}` }, run.is_live ? "running" : "ended"),
  );
  document.title = `${run.name} – polar-trl inspect`;
}

async function poll() {
  if (!document.hidden) {
    const isFirst = run === null;
    try {
      await askRun();
      if (isFirst) await route();
      else page?.update?.(run);
    } catch (error) {
      replace(status, h("span", { class: "live lost" }, error.message));
    }
  }
  setTimeout(poll, POLL_MS);
}

addEventListener("hashchange", route);
poll();
