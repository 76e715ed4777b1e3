// A whole trajectory as a thin strip beside its tokens: their colours, and the part that is on the screen.

import { h } from "./dom.js";

const WIDTH = 18;

export class TokenMap {
  /** `onGo` hears a place from 0 to 1. */
  constructor(onGo) {
    this.canvas = h("canvas", { class: "mini", "aria-hidden": "true", title: "The whole trajectory; click to go there" });
    const go = (event) => onGo(event.offsetY / this.canvas.clientHeight);
    this.canvas.addEventListener("pointerdown", go);
    this.canvas.addEventListener("pointermove", (event) => event.buttons && go(event));
  }

  /** `covered`: the share of the strip that the lines fill where they do not fill their page. */
  draw({ states, engine, gap, versions }, colorOf, names, covered) {
    const ratio = devicePixelRatio || 1;
    const height = this.canvas.clientHeight;
    if (!height) return;
    this.canvas.width = WIDTH * ratio;
    this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const bin = (height * covered) / Math.max(1, states.length);
    states.forEach((state, index) => {
      const trainer = engine[index] === null ? null : engine[index] + gap[index];
      const color = colorOf({ state: names[state], engine: engine[index], trainer, version: versions[index] });
      if (!color) return;
      pen.fillStyle = color.back;
      pen.fillRect(4, index * bin, WIDTH - 8, Math.max(1, bin));
    });
    this.image = pen.getImageData(0, 0, this.canvas.width, this.canvas.height);
  }

  drawView(scroller, spacer) {
    if (!this.image) return;
    const ratio = devicePixelRatio || 1;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.putImageData(this.image, 0, 0);
    pen.scale(ratio, ratio);
    const whole = spacer.clientHeight || 1;
    const height = this.canvas.clientHeight;
    const size = Math.min(height, Math.max(6, (height * scroller.clientHeight) / whole));
    const top = Math.min(height - size, (height * scroller.scrollTop) / whole);
    pen.strokeStyle = getComputedStyle(this.canvas).color;
    pen.strokeRect(0.5, top + 0.5, WIDTH - 1, size - 1);
  }
}
