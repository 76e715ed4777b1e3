// Numbers as people read them.

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) && size < 1e6) return minus(value.toLocaleString("en"));
  if (size >= 1e6) return `${trim((value / 1e6).toPrecision(digits))}M`;
  if (size >= 1e4) return `${trim((value / 1e3).toPrecision(digits))}k`;
  if (size >= 1e-3) return minus(trim(value.toPrecision(digits)));
  return minus(value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e"));
}

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

export function percent(share) {
  return share === null || share === undefined ? "–" : `${(100 * share).toFixed(share > 0 && share < 1 ? 1 : 0)} %`;
}

export function signed(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  return (value > 0 ? "+" : "") + number(value, digits);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(value < 0.1 ? 3 : 1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  const whole = Math.round(value / 60);
  return whole < 120 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  if (value < 1000) return `${value} B`;
  return value < 1e6 ? `${(value / 1e3).toFixed(0)} kB` : `${(value / 1e6).toFixed(1)} MB`;
}

export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

export function words(name) {
  return name.replaceAll("_", " ");
}

function minus(text) {
  return text.replaceAll("-", "−");
}

function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}
