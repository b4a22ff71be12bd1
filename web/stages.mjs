// How long the stages of an answer took, from what the page saw: no clock and no DOM in here.

const MIN_GENERATION_MS = 5; // browsers' clocks are coarse, and reads come in pieces

/**
 * @typedef {{firstMs: number | null, generationMs: number | null, totalMs: number | null,
 *            numTokens: number, exact: boolean, tokensPerS: number | null}} Figures
 */

/**
 * Work out an answer's figures. The number of tokens is the server's where it sends one (`exact`);
 * else it is the number of events, which never is more.
 * @param {import("./answer.mjs").Answer} answer
 * @returns {Figures}
 */
export function figuresOf(answer) {
  const { first, last, end } = answer.times;
  const exact = answer.usage !== null;
  const numTokens = answer.usage ? answer.usage.completion : answer.numDeltas;
  const generationMs = first !== null && last !== null ? last - first : null;
  // The first token's time is prefill's; the others came while it generated. Where all came in one
  // piece there is no such time to be seen from here, and so no speed.
  const isSeen = generationMs !== null && generationMs >= MIN_GENERATION_MS && numTokens > 1;
  const tokensPerS = isSeen ? ((numTokens - 1) / generationMs) * 1000 : null;
  return { firstMs: first, generationMs, totalMs: end ?? last, numTokens, exact, tokensPerS };
}

/** @param {number} ms */
export function formatMs(ms) {
  if (ms < 0.095) return `${Math.round(ms * 1000)} µs`;
  if (ms < 9.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 59950) return `${(ms / 1000).toFixed(ms < 9995 ? 2 : 1)} s`;
  return `${Math.floor(ms / 60000)} min ${Math.round((ms % 60000) / 1000)} s`;
}

/** @param {number} rate tokens per second */
export function formatRate(rate) {
  return rate < 99.5 ? rate.toFixed(1) : String(Math.round(rate));
}

/** @param {number} count @param {string} noun */
export function plural(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
