// Token tracks as bars on one scale of tokens: the sampled spans, and the prefix shared with an earlier track.

import { h, replace } from "./dom.js";
import { count, words } from "./format.js";
import { stateColors } from "./scales.js";

export class TrackMap {
  constructor(meta, onChoose) {
    this.onChoose = onChoose;
    this.element = h("div", { class: "tracks", role: "group", "aria-label": "Trajectories" });
    this.chosen = 0;
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
    this.show(meta);
  }

  close() {
    this.observer.disconnect();
  }

  show(meta) {
    this.meta = meta;
    this.bars = meta.tracks.map(() => h("canvas"));
    this.buttons = meta.tracks.map((track, number) =>
      h("button", { type: "button", class: "track", on: { click: () => this.onChoose(number) } },
        h("span", { class: "track-name" }, track.name),
        this.bars[number],
        h("span", { class: "track-facts" }, `${count(track.num_tokens)} tokens`,
          track.fork ? h("span", { class: "reason" }, track.fork.reason) : h("span", { class: "hint" }, Object.keys(track.tokens).map(words).join(", ")))));
    replace(this.element, this.buttons);
    this.choose(this.chosen);
    this.draw();
  }

  choose(number) {
    this.chosen = number;
    this.buttons.forEach((button, index) => button.setAttribute("aria-pressed", index === number));
    const button = this.buttons[number];
    if (!button || this.element.scrollHeight <= this.element.clientHeight) return;
    const [top, bottom] = [button.offsetTop, button.offsetTop + button.offsetHeight];
    if (top < this.element.scrollTop || bottom > this.element.scrollTop + this.element.clientHeight) this.element.scrollTop = top - 8;
  }

  draw() {
    const longest = Math.max(1, ...this.meta.tracks.map((track) => track.num_tokens));
    const colors = stateColors();
    const style = getComputedStyle(this.element);
    const [empty, shared] = [style.getPropertyValue("--track"), style.getPropertyValue("--shared")];
    const ratio = devicePixelRatio || 1;
    this.meta.tracks.forEach((track, number) => {
      const bar = this.bars[number];
      const [width, height] = [bar.clientWidth, bar.clientHeight];
      if (!width) return;
      bar.width = width * ratio;
      bar.height = height * ratio;
      const pen = bar.getContext("2d");
      pen.scale(ratio, ratio);
      const x = (tokens) => (tokens / longest) * width;
      pen.fillStyle = empty;
      pen.fillRect(0, 4, Math.max(2, x(track.num_tokens)), height - 8);
      if (track.fork) {
        pen.fillStyle = shared;
        pen.fillRect(0, 4, x(track.fork.shared), height - 8);
      }
      const state = Object.entries(track.tokens).sort((a, b) => b[1] - a[1])[0]?.[0];
      pen.fillStyle = colors[state]?.back ?? empty;
      for (const [start, end] of track.spans) pen.fillRect(x(start), 1, Math.max(1.5, x(end) - x(start)), height - 2);
    });
  }
}
