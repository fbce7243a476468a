// Figures as people read them.

const BYTE_UNITS = ["B", "KB", "MB", "GB", "TB"];

/** Three significant digits, without an exponent. */
export function figure(value) {
  if (value >= 100) return Math.round(value).toLocaleString("en");
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** [number, unit] of a time in seconds. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return ["–", ""];
  if (seconds >= 60) return [figure(seconds / 60), "min"];
  return seconds >= 1 ? [figure(seconds), "s"] : [figure(seconds * 1000), "ms"];
}

/** [number, unit] of a size in bytes. */
export function size(bytes) {
  let unit = 0;
  for (; bytes >= 1000 && unit < BYTE_UNITS.length - 1; unit += 1) bytes /= 1000;
  return [unit ? figure(bytes) : String(bytes), BYTE_UNITS[unit]];
}

/** A share of 1 in whole percents; one that isn't 0 doesn't look like 0. */
export function share(value) {
  return value > 0 && value < 0.005 ? "< 1 %" : `${Math.round(100 * value)} %`;
}

export const words = ([number, unit]) => (unit ? `${number} ${unit}` : number);

export const count = (value, one, many) => `${value.toLocaleString("en")} ${value === 1 ? one : many}`;

/** Time of day of a Unix time in seconds. */
export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en", { hour12: false });
}

/** An element with attributes, and children that are elements or texts. */
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** The same for SVG. */
export function drawing(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
