// The time axis of a request: from its receipt to its end, with the hand-off stretched where decode is much longer.
//
//   0 ......... knee ............ end      seconds
//   |  stretched  |     decode     |
//   0 ......... SHARE ............ 1       part of the width

const SHARE = 0.62;
const LONG = 3;
const STEPS = [1, 2, 5, 10];

/** How far the spans go: seconds at which nothing but decode goes on, and the end of all; 0 before any time has passed. */
function extent(spans, age) {
  const last = (span) => span.end ?? age;
  const before = spans.filter((span) => span.stage !== "decode").map(last);
  return { handed: Math.max(0, ...before), end: Math.max(0, ...spans.map(last)) };
}

/** The axis of a life, which may go on. */
export function axisOf(life, age, even) {
  const { handed, end } = extent(life.spans, age);
  const knee = handed * 1.12;
  const broken = !even && knee > 0 && end > LONG * knee;
  const at = (seconds) => {
    if (!broken) return end > 0 ? seconds / end : 0;
    return seconds <= knee ? (SHARE * seconds) / knee : SHARE + ((1 - SHARE) * (seconds - knee)) / (end - knee);
  };
  return { at: (seconds) => Math.min(1, at(seconds)), end, knee: broken ? knee : null, share: SHARE };
}

/** Round times to label, about `wanted` of them in [from, to]. None if no time has passed. */
export function ticks(from, to, wanted) {
  if (to <= from) return { step: 0, found: [] };
  const rough = (to - from) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * STEPS.find((each) => each * power >= rough * 0.999);
  const found = [];
  for (let number = Math.ceil(from / step); number * step <= to; number += 1) found.push(number * step);
  return { step, found };
}

/** A tick's label, with the digits that its step needs and the unit that suits times up to `most`. */
export function label(seconds, step, most) {
  if (seconds === 0) return "0";
  const [scale, unit] = most < 1 ? [1000, "ms"] : [1, "s"];
  const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  return `${(seconds * scale).toFixed(digits)} ${unit}`;
}
