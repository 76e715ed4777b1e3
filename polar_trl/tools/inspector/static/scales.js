// Colour scales. Lightness carries the value in every scale, so that they read without seeing hue; hues of the
// two-sided scale are blue and orange, which the common kinds of colour blindness tell apart.

const LIGHT = {
  sequential: ["#eef3f8", "#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b"],
  diverging: ["#0b4a8a", "#3b7fbe", "#8fbbe0", "#d5e4f1", "#f3f1ee", "#fbdcb8", "#f2ab63", "#cc6a15", "#8a3f04"],
  states: {
    trained: "#a8cbe9", trainable: "#a8cbe9", auxiliary: "#d9d9d9", evaluation: "#d9d9d9", superseded: "#d9d9d9", no_reward: "#f6c88f",
    zero_variance: "#f6c88f", cut: "#f6c88f", not_chosen: "#d9d9d9", too_long: "#e9a3c2", stale: "#e9a3c2", too_long_or_stale: "#e9a3c2",
  },
};
const DARK = {
  sequential: ["#1c2733", "#1f3a56", "#24517d", "#2b69a6", "#3a86cf", "#65a8e6", "#9cc9f5", "#d9ecff"],
  diverging: ["#9fd0ff", "#5b9edf", "#2f6ca8", "#20405f", "#262a30", "#553a1d", "#925617", "#d9862f", "#ffc98a"],
  states: {
    trained: "#24517d", trainable: "#24517d", auxiliary: "#454b53", evaluation: "#454b53", superseded: "#454b53", no_reward: "#7a4d14",
    zero_variance: "#7a4d14", cut: "#7a4d14", not_chosen: "#454b53", too_long: "#74335a", stale: "#74335a", too_long_or_stale: "#74335a",
  },
};
const STEPS = 64;
const dark = matchMedia("(prefers-color-scheme: dark)");

export function palette() {
  return dark.matches ? DARK : LIGHT;
}

export function onThemeChange(action) {
  dark.addEventListener("change", action);
  return () => dark.removeEventListener("change", action);
}

/** A scale: `color(value)` is {back, fore} or null; `low`, `high` and `stops` are for its legend. */
export function buildScale(stops, low, high) {
  const table = Array.from({ length: STEPS }, (_, step) => withFore(mix(stops, step / (STEPS - 1))));
  return {
    low,
    high,
    stops,
    color(value) {
      if (value === null || value === undefined) return null;
      const place = high === low ? 0 : (value - low) / (high - low);
      return table[Math.round(Math.min(1, Math.max(0, place)) * (STEPS - 1))];
    },
  };
}

export function stateColors() {
  return Object.fromEntries(Object.entries(palette().states).map(([name, back]) => [name, withFore(back)]));
}

/** 1, 2 or 5 times a power of ten, not below the value. */
export function niceCeil(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const nice = [1, 2, 5, 10].find((step) => step * power >= value * (1 - 1e-9));
  return Number((nice * power).toPrecision(6));
}

function withFore(back) {
  return { back, fore: luminance(back) > 0.18 ? "#10151b" : "#ffffff" };
}

function mix(stops, place) {
  const scaled = place * (stops.length - 1);
  const left = Math.min(stops.length - 2, Math.floor(scaled));
  const [a, b] = [parse(stops[left]), parse(stops[left + 1])];
  return `#${a.map((v, i) => Math.round(v + (b[i] - v) * (scaled - left)).toString(16).padStart(2, "0")).join("")}`;
}

function parse(color) {
  return [1, 3, 5].map((start) => parseInt(color.slice(start, start + 2), 16));
}

function luminance(color) {
  const [r, g, b] = parse(color).map((v) => ((v / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
