// A trajectory as tokens, coloured. The server breaks it into lines; the page holds the lines that are on its screen.

import { ask, debounce, h, notice, replace } from "./dom.js";
import { count } from "./format.js";
import { TrackMap } from "./track_map.js";
import { buildModes, MODES } from "./modes.js";
import { onThemeChange } from "./scales.js";
import { drawDetail } from "./token_detail.js";
import { TokenMap } from "./token_map.js";

const LINE = 21;
const BLOCK = 40;
const KEPT_BLOCKS = 24;
const SPARE = 12;
const GUTTER = 86;
const PART = 2; // the kind of a token that is a part of a character
const MAX_HEIGHT = 8e6; // browsers place nothing beyond some 16 million pixels

export async function showTokens(root, page) {
  const view = new Tokens(root, page);
  await view.openTrack(Number(page.params.track ?? 0));
  await view.goTo(page.params);
  return view;
}

class Tokens {
  constructor(root, page) {
    this.root = root;
    this.page = page;
    this.meta = page.meta;
    this.mode = MODES.some(([name]) => name === page.params.color) ? page.params.color : "state";
    this.caret = null;
    this.build();
    this.stopTheme = onThemeChange(() => this.recolor());
    this.observer = new ResizeObserver(debounce(80, () => this.resize()));
    this.observer.observe(this.scroller);
  }

  close() {
    this.stopTheme();
    this.observer.disconnect();
    this.tracks.close();
  }

  build() {
    this.legend = h("div", { class: "scale" });
    this.tracks = new TrackMap(this.meta, (track) => this.openTrack(track));
    this.detail = h("dl", { class: "detail", "aria-live": "polite" });
    this.spacer = h("div", { class: "spacer" });
    this.window = h("div", { class: "window" });
    this.spacer.append(this.window);
    this.scroller = h("div", { class: "token-scroll", tabindex: "0", role: "region", "aria-label": "Tokens. Left and right arrows move from token to token, n and p from call to call." }, this.spacer);
    this.map = new TokenMap((share) => { this.scroller.scrollTop = share * this.spacer.clientHeight - this.scroller.clientHeight / 2; });
    const modes = h("fieldset", { class: "modes" }, h("legend", {}, "Colour"), MODES.map(([name, title]) =>
      h("label", {}, h("input", { type: "radio", name: "mode", value: name, checked: name === this.mode, on: { change: () => this.setMode(name) } }), h("span", {}, title))));
    this.jump = h("button", { type: "button", title: "The token where trainer and engine differ most", on: { click: () => this.goTo({ at: this.track.gap.at }) } }, "Largest gap");
    const calls = h("span", { class: "group" },
      h("button", { type: "button", title: "Previous call (p)", on: { click: () => this.stepCall(-1) } }, "‹ call"),
      h("button", { type: "button", title: "Next call (n)", on: { click: () => this.stepCall(1) } }, "call ›"));
    const note = this.meta.vocabulary.known ? null : notice(this.meta.vocabulary.note);
    replace(this.root, note, this.tracks.element, h("div", { class: "toolbar" }, modes, this.legend, h("span", { class: "push" }), calls, this.jump), this.detail,
      h("div", { class: "token-view" }, this.scroller, this.map.canvas));
    this.scroller.addEventListener("scroll", () => this.draw(), { passive: true });
    this.window.addEventListener("pointerover", (event) => this.onPoint(event));
    this.window.addEventListener("click", (event) => this.onClick(event));
    this.scroller.addEventListener("keydown", (event) => this.onKey(event));
    const probe = h("span", { class: "tk probe" }, "0".repeat(100));
    this.scroller.append(probe);
    this.charWidth = probe.getBoundingClientRect().width / 100;
    probe.remove();
  }

  navigate(params) {
    const track = Number(params.track ?? 0);
    if (track !== this.number) this.openTrack(track).then(() => this.goTo(params));
    else this.goTo(params);
  }

  grow(meta) {
    this.meta = meta;
    this.tracks.show(meta);
    this.openTrack(this.number, this.scroller.scrollTop);
  }

  async openTrack(number_, top = 0) {
    if (!this.meta.tracks.length) {
      replace(this.root, notice(this.meta.calls.some((call) => call.text_only) ? "The model's server gave text without token ids: there are no tokens to show." : "No token was sampled in this session."));
      return;
    }
    this.number = Math.min(Math.max(0, number_ || 0), this.meta.tracks.length - 1);
    this.track = this.meta.tracks[this.number];
    this.tracks.choose(this.number);
    this.jump.disabled = !this.track.gap;
    this.caret = null;
    this.columns = this.countColumns();
    this.setScales();
    await this.reload(top);
    this.drawDetail(null);
  }

  countColumns() {
    const room = this.scroller.clientWidth - GUTTER - 22;
    return Math.max(20, Math.min(160, Math.floor(room / this.charWidth)));
  }

  async resize() {
    const columns = this.countColumns();
    if (!this.track) return;
    if (columns === this.columns) {
      this.drawMap();
      this.draw();
      return;
    }
    const first = this.firstToken();
    this.columns = columns;
    await this.reload(0);
    if (first) await this.goTo({ at: first }, false);
  }

  async reload(top) {
    this.blocks = new Map();
    this.overview = null;
    this.generation = (this.generation ?? 0) + 1;
    await this.fetchBlock(0);
    this.scroller.scrollTop = top;
    this.draw();
    this.fetchOverview();
  }

  async fetchOverview() {
    const generation = this.generation;
    try {
      const overview = await ask("overview", { key: this.page.params.key, track: this.number, columns: this.columns, bins: Math.max(50, this.map.canvas.clientHeight) });
      if (generation !== this.generation) return;
      this.overview = overview;
      this.drawMap();
    } catch {
      // the map is an aid; without it the tokens are all there
    }
  }

  async fetchBlock(block) {
    if (this.blocks.has(block)) return this.blocks.get(block);
    const generation = this.generation;
    const answer = ask("lines", { key: this.page.params.key, track: this.number, columns: this.columns, first: block * BLOCK, count: BLOCK });
    this.blocks.set(block, null);
    try {
      const data = await answer;
      if (generation !== this.generation) return null;
      this.blocks.set(block, data);
      this.setHeight(data.num_lines);
      for (const key of this.blocks.keys()) {
        if (this.blocks.size <= KEPT_BLOCKS) break;
        if (Math.abs(key - block) > 2) this.blocks.delete(key);
      }
      return data;
    } catch (error) {
      this.blocks.delete(block);
      replace(this.detail, notice(error.message, "bad"));
      return null;
    }
  }

  setHeight(numLines) {
    this.numLines = numLines;
    const whole = numLines * LINE + 12;
    this.squeeze = Math.max(1, whole / MAX_HEIGHT);
    this.spacer.style.height = `${Math.min(whole, MAX_HEIGHT)}px`;
  }

  firstLine() {
    return Math.floor((this.scroller.scrollTop * (this.squeeze ?? 1)) / LINE);
  }

  firstToken() {
    const line = this.firstLine();
    return this.blocks?.get(Math.floor(line / BLOCK))?.starts[line % BLOCK];
  }

  draw() {
    if (!this.numLines) {
      replace(this.window);
      return;
    }
    const top = this.firstLine();
    const shown = Math.ceil(this.scroller.clientHeight / LINE);
    const first = Math.max(0, top - SPARE);
    const last = Math.min(this.numLines, top + shown + SPARE);
    const state = `${this.generation}/${first}/${last}/${this.mode}`;
    const missing = [];
    for (let block = Math.floor(first / BLOCK); block <= Math.floor((last - 1) / BLOCK); block += 1) {
      if (!this.blocks.get(block)) missing.push(block);
    }
    if (missing.length) Promise.all(missing.map((block) => this.fetchBlock(block))).then((found) => { if (found.some(Boolean)) { this.drawn = null; this.draw(); } });
    const place = this.squeeze > 1 ? this.scroller.scrollTop - (top - first) * LINE : first * LINE;
    this.window.style.transform = `translateY(${place + 6}px)`;
    if (state !== this.drawn) {
      this.drawn = state;
      const lines = [];
      for (let line = first; line < last; line += 1) lines.push(this.buildLine(line));
      this.window.replaceChildren(...lines);
    }
    this.map.drawView(this.scroller, this.spacer);
  }

  buildLine(line) {
    const data = this.blocks.get(Math.floor(line / BLOCK));
    if (!data) return h("div", { class: "tl" }, h("span", { class: "gutter" }, "…"));
    const start = data.starts[line % BLOCK];
    const end = data.starts[(line % BLOCK) + 1] ?? data.end;
    const span = this.track.spans.findIndex(([from]) => from === start);
    const gutter = span >= 0 ? h("span", { class: "gutter begins" }, `call ${this.track.calls[span]}`) : h("span", { class: "gutter" }, count(start));
    const row = h("div", { class: "tl" }, gutter);
    const base = data.starts[0];
    for (let position = start; position < end; position += 1) {
      const index = position - base;
      const token = document.createElement("span");
      token.className = `tk k${data.kinds[index]}${data.states[index] ? " sampled" : ""}${position === this.caret ? " caret" : ""}`;
      token.textContent = data.texts[index];
      token.dataset.at = position;
      const color = this.colorOf(data, index);
      if (color) {
        token.style.backgroundColor = color.back;
        token.style.color = color.fore;
      }
      row.append(token);
    }
    return row;
  }

  colorOf(data, index) {
    return this.modes[this.mode].color({
      state: this.meta.states[data.states[index]],
      engine: data.engine[index],
      trainer: data.trainer[index],
      version: data.versions[index],
    });
  }

  setMode(mode) {
    this.mode = mode;
    history.replaceState(null, "", this.page.address({ track: this.number, color: mode }));
    this.page.params = { ...this.page.params, track: String(this.number), color: mode };
    this.recolor();
  }

  setScales() {
    this.modes = buildModes(this.meta, this.track);
    replace(this.legend, this.modes[this.mode].legend());
  }

  recolor() {
    if (!this.track) return;
    this.setScales();
    this.drawn = null;
    this.draw();
    this.drawMap();
    this.tracks.draw();
  }

  find(position) {
    for (const data of this.blocks.values()) {
      if (data && data.starts.length && position >= data.starts[0] && position < data.end) return { data, index: position - data.starts[0] };
    }
    return null;
  }

  onPoint(event) {
    const at = event.target.dataset?.at;
    if (at !== undefined) this.drawDetail(Number(at));
  }

  onClick(event) {
    const at = event.target.dataset?.at;
    if (at !== undefined) this.setCaret(Number(at));
  }

  setCaret(position) {
    this.window.querySelector(".caret")?.classList.remove("caret");
    this.caret = position;
    this.window.querySelector(`[data-at="${position}"]`)?.classList.add("caret");
    this.drawDetail(position);
  }

  async onKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) {
      event.preventDefault();
      const next = this.caret === null ? (this.firstToken() ?? 0) : this.caret + move;
      if (next < 0 || next >= this.track.num_tokens) return;
      if (!this.window.querySelector(`[data-at="${next}"]`)) await this.goTo({ at: next });
      else this.setCaret(next);
    } else if (event.key === "n") this.stepCall(1);
    else if (event.key === "p") this.stepCall(-1);
  }

  stepCall(move) {
    const here = this.caret ?? this.firstToken() ?? 0;
    const starts = this.track.spans.map(([start]) => start);
    const target = move > 0 ? starts.find((start) => start > here) : starts.findLast((start) => start < here);
    if (target !== undefined) this.goTo({ at: target });
  }

  /** Scroll to a token (`at`) or to a call's samples (`call`). */
  async goTo(params, marks = true) {
    if (!this.track) return;
    let position = params.at === undefined ? undefined : Number(params.at);
    if (position === undefined && params.call !== undefined) {
      const span = this.track.calls.indexOf(Number(params.call));
      if (span >= 0) position = this.track.spans[span][0];
    }
    if (position === undefined || !(position >= 0) || position >= this.track.num_tokens) return;
    const { line } = await ask("line", { key: this.page.params.key, track: this.number, columns: this.columns, position });
    await this.fetchBlock(Math.floor(line / BLOCK));
    const lead = marks ? Math.min(4, line) : 0;
    this.scroller.scrollTop = ((line - lead) * LINE) / this.squeeze;
    this.drawn = null;
    this.draw();
    if (marks) this.setCaret(position);
  }

  drawDetail(position) {
    const found = position === null ? null : this.find(position);
    drawDetail(this.detail, this.meta, this.track, position, found);
    if (found?.data.kinds[found.index] === PART) this.fetchBytes(position);
  }

  async fetchBytes(position) {
    const { bytes } = await ask("token", { key: this.page.params.key, track: this.number, position });
    this.detail.querySelector("dd")?.append(` bytes ${bytes}`);
  }

  drawMap() {
    if (!this.overview) return;
    const covered = Math.min(1, (this.numLines * LINE) / Math.max(1, this.scroller.clientHeight));
    this.map.draw(this.overview, (token) => this.modes[this.mode].color(token), this.meta.states, covered);
    this.map.drawView(this.scroller, this.spacer);
  }
}
